//! Reads any bytes in every raw data format. The parts of an accepted file are all its bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millstream_formats::{Index, all};

fuzz_target!(|bytes: &[u8]| {
    for format in all() {
        match Index::read(*format, bytes) {
            Ok(index) => {
                assert_eq!(index.fragment_bytes() + index.structure_bytes(), bytes.len() as u64);
                for source in index.sources.keys() {
                    let name = format.source_name(*source);
                    assert!(!name.is_empty() && name.len() <= 16 && !name.contains('/'), "{name}");
                }
            }
            Err(error) => assert!(error.offset <= bytes.len() as u64 && !error.field.is_empty(), "{error}"),
        }
    }
});
