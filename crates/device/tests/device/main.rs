//! Tests of the soft device through its public interface, within one process and between two. The second
//! process is this program in another role.

mod abandoned;
mod corrupted_arena;
mod deferred_moves;
mod errors;
mod events;
mod forged_peer;
mod fuzz_seeds;
mod gids;
mod hostile_socket;
mod lifetime;
mod multicast;
mod object_churn;
mod operations;
mod other_users;
mod packets_only;
mod peer_exit;
mod port;
mod process_kills;
mod queues;
mod regions;
mod registration;
mod resize;
mod retries;
mod semantics;
mod shared;
mod states;
mod stopped_peers;
mod support;
mod transfers;
mod unreliable;
mod windows;
mod wire;
mod wire_exit;
mod wire_timers;
mod wr_lists;
mod xrc;

/// Entry point of the other processes of these tests; not a test.
#[test]
#[ignore = "started by the tests that need another process"]
fn other_process() {
    match std::env::var("MILLSTREAM_TEST_ROLE").as_deref() {
        Ok("actor") => support::serve(),
        Ok("concurrent_creation") => lifetime::concurrent_creation(),
        Ok("key_table") => lifetime::key_table(),
        Ok("victim") => corrupted_arena::victim(),
        Ok("corruptor") => corrupted_arena::corruptor(),
        Ok("inline") => queues::inline(),
        Ok("deferred_moves") => deferred_moves::role(),
        Ok("churn") => object_churn::churn(),
        Ok("owner") => other_users::owner(),
        Ok("trespasser") => other_users::trespasser(),
        Ok("squatter") => other_users::squatter(),
        Ok("load") => process_kills::load::serve(),
        Ok("stepped_datagrams") => process_kills::datagrams::sender(),
        Ok("stepped_sender") => process_kills::stepping::sender(),
        Ok("registration") => registration::registers_under_stores(),
        Ok("permissions") => regions::must_permit_the_access(),
        Ok("descriptors") => regions::few_descriptors(),
        Ok("device memory") => regions::all_device_memory(),
        Ok("fork_tree") => peer_exit::fork_tree(),
        Ok("without_main_thread") => peer_exit::serve_without_main_thread(),
        Ok("forged_peer") => fuzz_seeds::forged_peer(),
        Ok("stranger") => hostile_socket::stranger(),
        Ok("joiner") => multicast::joiner(),
        Ok("mcast_listener") => multicast::listener(),
        Ok("mcast_sender") => multicast::sender(),
        Ok("mcast_short_of_descriptors") => multicast::short_of_descriptors(),
        Ok("mcast_late_interface") => multicast::late_interface(),
        Ok("full_queues") => other_users::full_queues(),
        Ok("xrc_member") => xrc::member(),
        Ok("xrc_sender") => xrc::sends_to_members_that_exit(),
        Ok("datagram_sender") => unreliable::sends_to_processes_that_exit(),
        Ok("peer") => operations::peer(support::send_to_parent, support::recv_from_parent),
        Ok("execing_sender") => abandoned::execing_sender(),
        Ok("crashing_sender") => abandoned::crashing_sender(),
        Ok("packet_sender") => abandoned::packet_sender(),
        Ok("qpn_reuse") => lifetime::qpn_reuse(),
        Ok("changing_interfaces") => gids::changing_interfaces(),
        Ok("node_guid") => gids::node_guid(),
        Ok("node_guid_here") => gids::node_guid_here(),
        Ok("wire_killed_peer") => wire::killed_peer(),
        Ok("wire_busy_receiver") => wire::busy_receiver(),
        Ok("wire_changed_path") => wire::changed_path(),
        Ok("wire_resume") => wire::resume(),
        Ok("wire_stray_disconnect") => wire::stray_disconnect(),
        Ok("wire_acknowledged") => wire::acknowledged(),
        Ok("wire_long_read") => wire::long_read(),
        Ok("wire_responder") => wire::responder(),
        Ok("wire_prompt_ack") => wire::prompt_ack(),
        Ok("wire_sender_to_exiting") => wire_exit::sender(),
        Ok("wire_exiting_receiver") => wire_exit::receiver(),
        Ok("wire_reset_timer") => wire_timers::reset_timer(),
        Ok("wire_delayed_packet") => wire_timers::delayed_packet(),
        Ok("wire_invalid_datagrams") => wire::invalid_datagrams(),
        Ok("port_survivors") => port::survivors(),
        Ok("port_users") => port::users(),
        Ok("other_user") => port::other_user(),
        Ok("port_parent") => port::parent(),
        Ok("port_forker") => port::forker(),
        role => panic!("{role:?} is no role"),
    }
}
