//! States, commands and message kinds: the numbers in registers and messages, and their meaning.

use crate::command::{bits, numbered};

numbered! {
    /// Kind of card memory.
    MemoryKind MEMORY_KINDS {
        0 Emulated = "host memory";
        1 Pci = "a BAR of a PCIe device";
        2 Cuda = "GPU memory";
    }
}

numbered! {
    /// State of the lease.
    LeaseState LEASE_STATES {
        0 Free = "no client holds the lease; a client can acquire it";
        1 Held = "a client holds the lease";
        2 Clearing = "the lease has ended: keys are invalid, regions stop, memory is cleared";
    }
}

numbered! {
    /// State of a card as a whole.
    CardState CARD_STATES {
        0 Running = "regions run";
        1 Pausing = "a pause of all regions at a safe point is requested";
        2 Paused = "every region is paused, stopped or empty; registers and memory are consistent";
    }
}

numbered! {
    /// Command of the lease holder to a card as a whole.
    CardCommand CARD_COMMANDS {
        1 Pause = "pause all regions at a safe point and publish the dirty bitmap";
        2 Resume = "resume all regions";
        3 Clear = "zero all memory";
    }
}

numbered! {
    /// State of a region.
    RegionState REGION_STATES {
        0 Empty = "no kernel is loaded";
        1 Ready = "a kernel is loaded and idle";
        2 Running = "the kernel runs";
        3 Stopping = "a stop at a safe point is requested";
        4 Done = "the latest run has completed";
        5 Faulted = "the latest command or run failed; see the region's cause";
        6 Paused = "the kernel is paused at a safe point because the card is paused";
        7 Hung = "an end was requested and the kernel reaches no safe point; the region refuses commands until it does";
    }
}

numbered! {
    /// Command in a region's doorbell.
    RegionCommand REGION_COMMANDS {
        1 Load = "load the kernel that the control registers name, in place of the loaded one";
        2 Start = "run the kernel with the argument words";
        3 Stop = "end the run at its next safe point";
        4 Unload = "unload the kernel";
        5 Resume = "run the kernel with the argument words from the state in `resume_state`";
    }
}

numbered! {
    /// State of the connection to a peer card.
    PeerState PEER_STATES {
        0 None = "no connection was requested";
        1 Connecting = "the connection is being established";
        2 Connected = "the DMA engine can reach the peer";
        3 Failed = "the connection could not be established, or was lost; see `peer_cause`";
    }
}

numbered! {
    /// Kind of a message.
    MessageKind MESSAGE_KINDS {
        1 LeaseGranted = "the client holds the lease; `values`: time to its expiry (ns); keys of BAR0's control window (low half) and of BAR2 (high half); key of BAR4 (low half); address of BAR4";
        2 LeaseEnded = "the client's lease has ended; `cause`: why, zero: released";
        3 RegionLoaded = "a region has loaded a kernel; `values`: its hash";
        4 RegionDone = "a run has completed; `values`: the first four result words";
        5 RegionFault = "a command or run has failed; `values`: the detail";
        6 CardPaused = "all regions are paused; `values`: dirty memory (bytes)";
        7 CardFault = "a card command failed; `values`: the detail";
        8 DmaDone = "DMA transfers are complete; `values`: `dma_completed`";
        9 DmaFault = "a DMA transfer failed; `values`: its slot, the detail";
        10 PeerConnected = "a peer is connected; `values`: its number in the peer table";
        11 PeerFault = "a peer could not be connected; `values`: its number in the peer table";
    }
}

bits! {
    /// Every bit of `sensors`, for the documentation.
    SENSORS: u32 {
        0 SENSOR_TEMPERATURE = "`temperature_mdeg` is valid";
        1 SENSOR_POWER = "`power_mw` and `energy_uj` are valid";
        2 SENSOR_OF_HOST = "the values are those of the host that emulates the card";
    }
}
