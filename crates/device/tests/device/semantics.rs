//! Rules of the specification that kernel and vendor drivers have broken, and the tests of them, in shared
//! memory and on the wire.

use std::path::Path;
use std::time::{Duration, Instant};

use millstream_device::qp::state::QpState;
use millstream_device::types::{
    SEND_INLINE, WC_LOC_PROT_ERR, WC_REM_ACCESS_ERR, WC_RETRY_EXC_ERR, WC_SUCCESS, WR_RDMA_READ,
    WR_RDMA_WRITE, WR_SEND,
};
use millstream_device::{MAX_MSG, MAX_SGE};

use crate::support::{Command, CqKind, End, Kind, Placement, QpConfig, pair, request};

/// Each rule with its tests, as `file::test` of this crate's tests, or a path below `crates`.
const RULES: &[(&str, &[&str])] = &[
    (
        "over-long datagrams are dropped and the queue pair lives",
        &[
            "unreliable::datagrams_that_cannot_be_delivered_are_dropped",
            "events::a_datagram_that_overflows_the_completion_queue_is_reported",
        ],
    ),
    (
        "bounds by subtraction, never by addition",
        &[
            "errors::a_range_that_leaves_the_region",
            "semantics::ranges_at_the_end_of_the_address_space_do_not_wrap",
        ],
    ),
    ("atomic operations on eight aligned bytes only", &["errors::an_atomic_operation_on_no_word"]),
    (
        "what lies in shared memory is copied first, then checked",
        &[
            "corrupted_arena::a_corrupted_arena_causes_errors_only",
            "../../src/cq/tests.rs::completions_carry_no_impossible_values",
            "../../src/cq/tests.rs::a_completion_in_the_wrong_queue_is_dropped",
        ],
    ),
    (
        "indices are acquired and released",
        &[
            "queues::completions_come_once_and_in_order_around_the_rings",
            "resize::resizing_under_load_loses_nothing",
            "object_churn::threads_and_forks_on_one_context",
        ],
    ),
    ("lengths are summed in 64 bits", &["semantics::sums_of_lengths_do_not_wrap"]),
    (
        "functions return positive errno",
        &[
            "../../../capi/src/errno.rs::each_convention_reports_the_same_error",
            "../../../capi/src/errno.rs::an_error_is_never_zero",
        ],
    ),
    (
        "the retransmit timer never ends an RNR wait",
        &[
            "retries::rnr_retry_seven_retries_forever_without_polling",
            "retries::rnr_retries_take_the_receivers_time",
        ],
    ),
    (
        "retry_cnt 7 is 7, rnr_retry 7 is for ever",
        &[
            "semantics::retry_count_seven_is_finite",
            "retries::rnr_retry_seven_retries_forever_without_polling",
        ],
    ),
    (
        "after an error everything later is flushed, in order",
        &[
            "queues::err_flushes_both_queues_in_order",
            "errors::earlier_requests_complete_before_a_failing_one",
            "process_kills/mod::the_survivor_gets_errors_and_continues",
        ],
    ),
    (
        "a full completion queue is an error of the queue pair and an event",
        &[
            "queues::a_full_completion_queue_of_the_sender_is_fatal",
            "queues::a_full_completion_queue_of_the_receiver_is_fatal",
        ],
    ),
    (
        "invalidate only what may be invalidated",
        &["windows::only_windows_of_type_2_can_be_invalidated_by_their_queue_pairs"],
    ),
    ("a region with bound windows stays", &["windows::a_region_with_bound_windows_cannot_be_deregistered"]),
    ("timers die with their queue pair", &["semantics::timers_die_with_their_queue_pair"]),
    (
        "a queue pair is published only when it is complete",
        &[
            "lifetime::concurrently_created_queue_pairs_are_independent",
            "lifetime::a_reused_qpn_has_no_former_state",
        ],
    ),
    (
        "only what is accepted is advertised",
        &[
            "queues::sizes_beyond_the_devices_are_refused",
            "states::values_out_of_range_are_refused",
            "semantics::the_longest_message_is_accepted_and_no_longer_one",
        ],
    ),
    (
        "keys and numbers are random, and checked for each queue pair",
        &[
            "queues::numbers_and_keys_differ_and_cannot_be_guessed",
            "errors::a_key_that_is_not_valid",
            "errors::memory_of_another_protection_domain",
            "errors::access_that_was_not_granted",
        ],
    ),
    (
        "an entry of a shared table has one owner",
        &[
            "lifetime::concurrently_created_queue_pairs_are_independent",
            "lifetime::a_full_key_table_refuses_and_keys_do_not_come_back",
        ],
    ),
    (
        "requests that wait make progress by themselves",
        &[
            "retries::a_sleeping_sender_is_woken_by_its_channel",
            "retries::held_back_requests_resume_with_the_send_queue",
        ],
    ),
    (
        "a killed holder's lock goes to the next",
        &[
            "peer_exit::a_lock_of_a_killed_producer_does_not_block_others",
            "../../../lockfree/src/robust.rs::a_lock_is_taken_from_a_holder_that_exited",
        ],
    ),
    (
        "length and padding are checked before there is a payload",
        &[
            "../../../wire/tests/packets.rs::errors_name_the_invalid_field",
            "wire::invalid_datagrams_have_no_effect",
        ],
    ),
    (
        "opcodes that are not known are dropped",
        &[
            "../../../wire/tests/packets.rs::errors_name_the_invalid_field",
            "wire::invalid_datagrams_have_no_effect",
        ],
    ),
    (
        "an atomic write has exactly eight bytes",
        &["../../../proto/tests/responder.rs::keys_lengths_and_positions_are_checked"],
    ),
    (
        "datagrams on the wire that are too long are dropped and the queue pair lives",
        &["../../../proto/tests/unreliable.rs::oversized_datagrams_and_wrong_qkeys_are_dropped"],
    ),
    (
        "a READ brings no more than it asked for",
        &["../../../proto/tests/requester.rs::read_data_must_have_the_requested_length"],
    ),
    (
        "a duplicate READ does not reset the responder",
        &[
            "../../../proto/tests/responder.rs::duplicate_read_is_executed_again",
            "../../../proto/tests/responder.rs::duplicate_read_beyond_the_original_range_is_ignored",
        ],
    ),
    (
        "a duplicate is acknowledged with the number of the last acknowledgement, never of a READ",
        &["../../../proto/tests/responder.rs::duplicate_is_acknowledged_with_the_last_acknowledged_psn"],
    ),
    (
        "a READ is repeated from the middle",
        &[
            "../../../proto/tests/requester.rs::read_is_requested_again_from_the_first_missing_packet",
            "../../../proto/tests/responder.rs::duplicate_read_from_the_middle_returns_the_rest",
        ],
    ),
    (
        "what a responder remembers is bounded, and freed",
        &[
            "../../../proto/tests/responder.rs::stored_results_are_bounded",
            "../../../proto/tests/responder.rs::outstanding_reads_beyond_the_limit_are_refused",
            "../../../proto/tests/responder.rs::duplicates_do_not_fill_the_response_queue",
        ],
    ),
    (
        "packet numbers are compared in a circle of 24 bits",
        &["../../../proto/tests/responder.rs::psns_are_compared_modulo_2_24"],
    ),
    (
        "timers on the wire keep to their rules",
        &[
            "../../../proto/tests/requester.rs::retransmit_timer_does_not_end_an_rnr_wait",
            "../../../proto/tests/requester.rs::retry_count_7_is_finite",
            "../../../proto/tests/requester.rs::rnr_retry_7_is_infinite_and_6_is_finite",
        ],
    ),
    (
        "strangers who guess do not end a connection",
        &[
            "../../../proto/tests/hostile.rs::forged_packets_outside_the_window_are_ignored",
            "../../../proto/tests/hostile.rs::only_the_expected_psn_can_fail_a_connection",
            "../../../proto/tests/hostile.rs::early_packets_from_another_port_do_not_replace_genuine_ones",
            "../../../proto/tests/hostile.rs::early_send_that_is_too_long_counts_as_lost",
            "../../../proto/tests/hostile.rs::replayed_packets_are_ignored",
            "../../../proto/tests/requester.rs::packets_from_other_addresses_are_dropped",
        ],
    ),
];

#[test]
fn each_rule_has_its_tests() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device");
    for (rule, tests) in RULES {
        assert!(!tests.is_empty(), "{rule}");
        for test in *tests {
            let (file, name) = test.rsplit_once("::").expect("a file and a test");
            let file = if file.ends_with(".rs") { file.to_owned() } else { format!("{file}.rs") };
            let source = std::fs::read_to_string(here.join(&file)).expect(&file);
            let declared = format!("fn {name}() {{\n");
            let at = source.find(&declared).unwrap_or_else(|| panic!("{rule}: no {test}"));
            let before = source[..at].trim_end();
            assert!(before.ends_with("#[test]"), "{rule}: {test} is no test that always runs");
        }
    }
}

#[test]
fn ranges_at_the_end_of_the_address_space_do_not_wrap() {
    for place in Placement::BOTH {
        for (opcode, at, len) in [
            (WR_RDMA_WRITE, u64::MAX, 1),
            (WR_RDMA_WRITE, u64::MAX - 7, 8),
            (WR_RDMA_READ, u64::MAX - 62, 64),
            (WR_RDMA_READ, 0u64.wrapping_sub(32), 64),
        ] {
            let (mut a, mut b) = pair(place, &QpConfig::default());
            let (source, target) = (a.register(Kind::Anonymous, 64, 0), b.register(Kind::Anonymous, 64, 0));
            a.post(request(1, opcode, &[source.part(0, len)], (at, target.key)));
            assert_eq!(a.sent(1)[0].status, WC_REM_ACCESS_ERR, "{len} bytes at {at:#x}");
        }
        // Local memory likewise.
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let (source, target) = (a.register(Kind::Anonymous, 64, 0), b.register(Kind::Anonymous, 64, 0));
        a.write(1, &[(u64::MAX - 7, 8, source.key)], (target.addr, target.key));
        assert_eq!(a.sent(1)[0].status, WC_LOC_PROT_ERR);
    }
}

#[test]
fn sums_of_lengths_do_not_wrap() {
    let (mut a, mut b) = pair(Placement::SameProcess, &QpConfig::default());
    let (source, target) = (a.register(Kind::Anonymous, 64, 0), b.register(Kind::Anonymous, 64, 0));
    b.recv(7, &[target.all()]);
    // 2^32 and 2^32 + 32 bytes: truncated to 32 bits they would fit inline data and the receive.
    for second in [1 << 31, (1 << 31) + 32] {
        let sges = [(source.addr, 1 << 31, source.key), (source.addr, second, source.key)];
        for opcode in [WR_SEND, WR_RDMA_WRITE] {
            for flags in [0, SEND_INLINE] {
                let mut wr = request(1, opcode, &sges, (target.addr, target.key));
                wr.flags |= flags;
                let refused = a.attempt(Command::Send(wr)).map(drop);
                assert_eq!(refused, Err(libc::EINVAL), "operation {opcode}, flags {flags}");
            }
        }
    }
    b.has_nothing(CqKind::Recv);
    a.send(2, &[source.all()]);
    assert_eq!((a.sent(1)[0].status, b.received(1)[0].byte_len), (WC_SUCCESS, 64));
}

#[test]
fn the_longest_message_is_accepted_and_no_longer_one() {
    let config = QpConfig { sges: MAX_SGE, ..QpConfig::default() };
    let (mut a, _b) = pair(Placement::SameProcess, &config);
    let part = u32::try_from(MAX_MSG / u64::from(MAX_SGE)).expect("a part of it");
    let source = a.register(Kind::Anonymous, part as usize + 1, 0);
    let mut sges = vec![source.part(0, part as usize); MAX_SGE as usize];
    // It waits for a receive.
    a.send(1, &sges);
    sges[0].1 += 1;
    assert_eq!(a.attempt(Command::Send(request(2, WR_SEND, &sges, (0, 0)))).map(drop), Err(libc::EINVAL));
    assert_eq!(a.state(), QpState::Rts);
}

#[test]
fn timers_die_with_their_queue_pair() {
    // 67 ms, with one retry.
    let config = QpConfig { timeout: 14, retry_cnt: 1, ..QpConfig::default() };
    for destroyed in [false, true] {
        let (mut a, mut b) = (End::new(Placement::SameProcess), End::new(Placement::OtherProcess));
        let (to_a, to_b) = (a.open(&config), b.open(&config));
        a.connect_to(to_b, &config);
        let source = a.hold(&[1; 64]);
        // The peer is not ready: the request is retried until its retries are exhausted.
        a.send(1, &[source.all()]);
        std::thread::sleep(Duration::from_millis(40));
        if destroyed {
            a.destroy();
            assert_eq!(a.async_event(Duration::from_millis(250)), None);
            continue;
        }
        a.modify(QpState::Reset, &config);
        // Connected again: the old connection's timer must not fire now.
        a.connect_to(to_b, &config);
        b.modify(QpState::Init, &config);
        b.attempt(Command::Connect(to_a, config.clone())).expect("to RTR");
        b.recv(2, &[]);
        std::thread::sleep(Duration::from_millis(250));
        a.has_nothing(CqKind::Send);
        assert_eq!(a.state(), QpState::Rts);
        a.send(3, &[]);
        assert_eq!(a.sent(1)[0].wr_id, 3);
        // The timer of the new connection does fire.
        let mut lonely = End::new(Placement::SameProcess);
        lonely.open(&config);
        let mut silent = End::new(Placement::OtherProcess);
        let number = silent.open(&config);
        lonely.connect_to(number, &config);
        lonely.send(4, &[]);
        assert_eq!(lonely.sent(1)[0].status, WC_RETRY_EXC_ERR);
    }
}

#[test]
fn retry_count_seven_is_finite() {
    // 4.19 ms, with seven retries.
    let config = QpConfig { timeout: 10, retry_cnt: 7, ..QpConfig::default() };
    let (mut a, mut b) = (End::new(Placement::SameProcess), End::new(Placement::OtherProcess));
    a.open(&config);
    a.connect_to(b.open(&config), &config);
    let start = Instant::now();
    a.send(1, &[]);
    assert_eq!(a.sent(1)[0].status, WC_RETRY_EXC_ERR);
    assert!(start.elapsed() >= Duration::from_micros(33_554), "{:?}", start.elapsed());
}
