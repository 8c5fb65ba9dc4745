//! The process that compiles a module, for the tests: `compile-module SECONDS BYTES`.

fn main() {
    let limits: Vec<u64> = std::env::args().skip(1).map(|word| word.parse().expect("a number")).collect();
    let [seconds, bytes] = limits[..] else { panic!("{limits:?}") };
    std::process::exit(millstream_wasm::compile_for_parent(seconds, bytes).expect("a parent"));
}
