//! Neighbours, supervisors and headers that lie; `make fuzz FUZZ_TARGETS=torus` searches further.

#[path = "common/hostile.rs"]
mod hostile;

use std::path::Path;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_node_among_liars_accounts_for_every_packet(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        hostile::play(&bytes);
    }
}

#[test]
fn seeds_of_the_fuzz_target_pass() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/torus");
    let seeds: Vec<_> = std::fs::read_dir(&folder).expect("seeds").filter_map(Result::ok).collect();
    assert!(!seeds.is_empty(), "{} is empty", folder.display());
    for seed in seeds {
        hostile::play(&std::fs::read(seed.path()).expect("a seed"));
    }
}
