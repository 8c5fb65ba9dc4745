//! Accelerator cards: register map, memory, kernels, and the emulated card process.
