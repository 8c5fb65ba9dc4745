//! The DMA engine between two leases.

use super::*;

struct NoSink;

impl NotificationSink for NoSink {
    fn notify(&self, _: Notification) {}
}

fn engine() -> DmaEngine {
    let hardware = Hardware::emulated(1 << 20);
    let polling = PollPolicy { spin: Duration::ZERO, heartbeat: Duration::from_millis(100) };
    DmaEngine::new((hardware, 1 << 20), Arc::default(), Arc::new(NoSink), Arc::default(), polling, None)
        .unwrap()
}

/// The engine sees a command, and its lease ends and the next one begins before the engine begins the command.
#[test]
fn a_command_of_an_ended_lease_does_not_run_in_the_next_one() {
    let mut engine = engine();
    let registers = engine.hardware.registers.clone();
    for command in [registers.dma_producer(), registers.peer_command()] {
        command.store(1, Ordering::SeqCst);
        assert!(engine.has_command());
        engine.control.start_reset();
        assert!(engine.control.is_reset(), "it has nothing to reset");
        command.store(0, Ordering::SeqCst);
        engine.control.reopen();
        assert!(engine.control.begin());
        assert_eq!(engine.dispatch(), None);
        assert_eq!(registers.dma_consumer().load(Ordering::SeqCst), 0);
        assert_eq!(registers.dma_failed().load(Ordering::SeqCst), 0);
        // As at the end of the lease: the engine has begun.
        engine.control.start_reset();
        assert!(!engine.control.is_reset());
        engine.reset();
        engine.control.reopen();
    }
}
