//! The C ABI of the soft device: libibverbs.so.1.
