//! Numbers of states, commands and kinds of messages, each with what it means.

use crate::command::{bits, numbered};

numbered! {
    /// What card memory is made of.
    MemoryKind MEMORY_KINDS {
        0 Emulated = "memory of the host";
        1 Pci = "a BAR of a PCIe device";
        2 Cuda = "memory of a GPU";
    }
}

numbered! {
    /// Who may use the card.
    LeaseState LEASE_STATES {
        0 Free = "nobody holds the lease; the lease word can be taken";
        1 Held = "a node holds it";
        2 Clearing = "it has ended: keys are invalid, regions stop, memory is cleared";
    }
}

numbered! {
    /// What a card as a whole does.
    CardState CARD_STATES {
        0 Running = "regions run";
        1 Pausing = "regions are on their way to a safe point";
        2 Paused = "every region is at a safe point, stopped or empty; registers and memory are consistent";
    }
}

numbered! {
    /// What the holder of the lease can ask of the card as a whole.
    CardCommand CARD_COMMANDS {
        1 Pause = "bring all regions to a safe point, show what memory was written";
        2 Resume = "let them go on";
        3 Clear = "zero all memory";
    }
}

numbered! {
    /// What a region does.
    RegionState REGION_STATES {
        0 Empty = "no kernel is loaded";
        1 Ready = "a kernel is loaded and does not run";
        2 Running = "it runs";
        3 Stopping = "it is on its way to a safe point to end there";
        4 Done = "the latest run has reached its end";
        5 Faulted = "the latest command or run failed; see the region's cause";
        6 Parked = "it waits at a safe point because the card is paused";
        7 Lost = "its kernel was to end and does not reach a safe point; the region refuses commands until it does";
    }
}

numbered! {
    /// What a region can be told by its doorbell.
    RegionCommand REGION_COMMANDS {
        1 Load = "load the kernel that the control registers name, in place of the one loaded";
        2 Start = "run the kernel with the argument words";
        3 Stop = "end the run at its next safe point";
        4 Unload = "forget the kernel";
        5 Continue = "run the kernel with the argument words from the state in the resume words";
    }
}

numbered! {
    /// What a card knows about another card.
    PeerState PEER_STATES {
        0 None = "no connection was asked for";
        1 Connecting = "being connected";
        2 Connected = "copies can be made";
        3 Failed = "could not be connected, or the connection was lost; see `peer_cause`";
    }
}

numbered! {
    /// What a message is about.
    MessageKind MESSAGE_KINDS {
        1 LeaseGranted = "the node holds the lease from now on; `values`: time to its end [ns]; keys of BAR0's control window (low half) and of BAR2 (high half); key of BAR4 (low half); address of BAR4's first byte";
        2 LeaseEnded = "the node's lease is over; `cause` says why, zero: it was given back";
        3 RegionLoaded = "a region has loaded its kernel; `values`: its hash";
        4 RegionDone = "a run has reached its end; `values`: the first four result words";
        5 RegionFault = "a command or run has failed; `values`: the detail";
        6 CardPaused = "all regions are at a safe point; `values`: memory written [bytes]";
        7 CardFault = "a card command failed; `values`: the detail";
        8 CopyDone = "copies are complete; `values`: `copy_completed`";
        9 CopyFault = "a copy failed; `values`: its slot, the detail";
        10 PeerConnected = "another card is connected; `values`: its number in the table of peers";
        11 PeerFault = "another card could not be connected; `values`: its number in the table of peers";
    }
}

bits! {
    /// Every bit of `sensors`, for the documentation.
    SENSORS: u32 {
        0 SENSOR_TEMPERATURE = "`temperature_mdeg` is known";
        1 SENSOR_POWER = "`power_mw` and `energy_uj` are known";
        2 SENSOR_OF_HOST = "they were measured on the host that the card is emulated on, not on a card";
    }
}
