//! The BPF program that selects the socket of each datagram by its destination process.
//!
//! A classic BPF program (Documentation/networking/filter.rst), attached to a `SO_REUSEPORT` group, reads the
//! UDP payload and returns a socket index. It reads the destination queue pair number from the base transport
//! header. The high bits are the QPN prefix of a process, whose socket index it finds by binary search.

use std::io;
use std::os::fd::BorrowedFd;

use crate::{QPN_INDEX_BITS, sockopt};

/// Offset of the word with the destination queue pair number in the base transport header.
const QPN_WORD: u32 = 4;

const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const SHIFT_RIGHT: u16 = (libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// `BPF_MAXINSNS`.
const MAX_INSTRUCTIONS: usize = 4096;

fn instruction(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Selects the socket index of each `(qpn_prefix, index)`, sorted by prefix. All other datagrams go to index
/// zero, as do those that are too short (a load beyond the end returns zero).
fn program(indices: &[(u16, u16)]) -> Vec<libc::sock_filter> {
    let mut program = vec![
        instruction(LOAD_WORD, QPN_WORD, 0, 0),
        instruction(AND, 0xff_ffff, 0, 0),
        instruction(SHIFT_RIGHT, QPN_INDEX_BITS, 0, 0),
    ];
    search(indices, &mut program);
    program
}

fn search(indices: &[(u16, u16)], program: &mut Vec<libc::sock_filter>) {
    if indices.len() <= 2 {
        for &(qpn_prefix, index) in indices {
            program.push(instruction(IF_EQUAL, qpn_prefix.into(), 0, 1));
            program.push(instruction(RETURN, index.into(), 0, 0));
        }
        program.push(instruction(RETURN, 0, 0, 0));
        return;
    }
    let (low, high) = indices.split_at(indices.len() / 2);
    let mut below = Vec::new();
    search(low, &mut below);
    // Conditional jumps reach 255 instructions, unconditional ones any.
    program.push(instruction(IF_AT_LEAST, high[0].0.into(), 0, 1));
    program.push(instruction(JUMP, below.len() as u32, 0, 0));
    program.append(&mut below);
    search(high, program);
}

/// Replaces the program of the socket's group.
pub(super) fn attach(socket: BorrowedFd<'_>, indices: &mut [(u16, u16)]) -> io::Result<()> {
    indices.sort_unstable();
    let mut program = program(indices);
    if program.len() > MAX_INSTRUCTIONS {
        return Err(io::Error::other(format!(
            "{} processes on the port exceed the limit of BPF instructions",
            indices.len()
        )));
    }
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    sockopt::set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, &program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Interprets the program like the kernel.
    fn run(program: &[libc::sock_filter], payload: &[u8]) -> u32 {
        let (mut a, mut at) = (0u32, 0);
        loop {
            let i = program[at];
            at += 1;
            match i.code {
                LOAD_WORD => match payload.get(i.k as usize..i.k as usize + 4) {
                    Some(word) => a = u32::from_be_bytes(word.try_into().unwrap()),
                    None => return 0,
                },
                AND => a &= i.k,
                SHIFT_RIGHT => a >>= i.k,
                JUMP => at += i.k as usize,
                IF_EQUAL => at += usize::from(if a == i.k { i.jt } else { i.jf }),
                IF_AT_LEAST => at += usize::from(if a >= i.k { i.jt } else { i.jf }),
                RETURN => return i.k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    proptest! {
        #[test]
        fn selects_every_process(map: BTreeMap<u16, u16>, qpn in 0u32..1 << 24) {
            let indices: Vec<_> = map.iter().map(|(b, p)| (b & 0xfff, *p)).collect::<BTreeMap<_, _>>().into_iter().collect();
            let program = program(&indices);
            let known = indices.iter().map(|(qpn_prefix, index)| (u32::from(*qpn_prefix) << 12 | 0x123, u32::from(*index)));
            let unknown = indices.iter().all(|(b, _)| u32::from(*b) != qpn >> 12).then_some((qpn, 0));
            for (qpn, index) in known.chain(unknown) {
                let mut bth = [0xff; 12];
                bth[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
                prop_assert_eq!(run(&program, &bth), index);
            }
            prop_assert_eq!(run(&program, &[1; 7]), 0);
        }
    }

    #[test]
    fn thousand_processes_fit() {
        let indices: Vec<_> = (1..1024).map(|i| (i, i)).collect();
        assert!(program(&indices).len() <= MAX_INSTRUCTIONS);
    }
}
