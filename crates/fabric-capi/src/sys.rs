//! Types, constants and declarations of `millstream_fabric.h`.
#![allow(non_camel_case_types, unreachable_pub, reason = "generated")]

include!(concat!(env!("OUT_DIR"), "/fabric.rs"));
