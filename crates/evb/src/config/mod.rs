//! TOML.
