//! Registers of the health page: one 64-bit word each, with one writer, stored at once.
//!
//! One list gives the positions of all fields, their accessors, and the table of the documentation ([`FIELDS`]).
//! Values are input: any word can be read, undefined codes become the worst defined state.

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$code_doc:meta])* $code:ident = $value:literal,)* } else $worst:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub enum $name { $($(#[$code_doc])* $code = $value,)* }

        impl $name {
            /// From a register's field; an undefined code is the worst state.
            #[must_use]
            pub fn from_code(code: u64) -> $name {
                match code { $($value => $name::$code,)* _ => $name::$worst }
            }
        }
    };
}

codes!(
    /// State of a host or an adapter.
    Condition {
        /// It works.
        Ok = 0,
        /// A sensor is over its threshold.
        Sick = 1,
        /// It announced its end.
        Stopping = 2,
        /// It failed.
        Failed = 3,
    } else Failed
);
codes!(
    /// State of a link. The codes 3 and 5 are reserved.
    LinkState {
        /// The torus has no such link.
        Absent = 0,
        /// Being connected.
        Training = 1,
        /// Frames arrive.
        Up = 2,
        /// No frames arrive.
        Broken = 4,
    } else Broken
);

/// A field of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The register.
    pub register: &'static str,
    /// The field.
    pub name: &'static str,
    /// Its lowest bit.
    pub shift: u32,
    /// Its width (bits).
    pub bits: u32,
}

macro_rules! registers {
    ($($(#[$doc:meta])* $register:ident { $($(#[$field_doc:meta])* $get:ident, $set:ident: $shift:literal, $bits:literal;)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
            pub struct $register(pub u64);

            impl $register {
                $(
                    $(#[$field_doc])*
                    #[must_use]
                    pub fn $get(self) -> u64 {
                        self.0 >> $shift & ((1 << $bits) - 1)
                    }

                    /// With another value of the field; bits beyond its width are cut off.
                    #[must_use]
                    pub fn $set(self, value: u64) -> $register {
                        let mask = ((1_u64 << $bits) - 1) << $shift;
                        $register(self.0 & !mask | value << $shift & mask)
                    }
                )*
            }
        )*

        /// All fields.
        pub const FIELDS: &[Field] = &[
            $($(Field {
                register: stringify!($register),
                name: stringify!($get),
                shift: $shift,
                bits: $bits,
            },)*)*
        ];
    };
}

registers! {
    /// Host watchdog register, written by the host monitor.
    HostWatchdog {
        /// Grows with every write.
        sequence, with_sequence: 0, 32;
        /// The host's [`Condition`].
        host, with_host: 32, 2;
        /// Whether the service network is reachable.
        service, with_service: 34, 1;
        /// Sensor level of memory.
        memory, with_memory: 35, 2;
        /// Sensor level of disks.
        disk, with_disk: 37, 2;
        /// Sensor level of temperature.
        temperature, with_temperature: 39, 2;
        /// Sensor level of load.
        load, with_load: 41, 2;
        /// Sensor level of applications.
        applications, with_applications: 43, 2;
        /// Request to the adapter.
        request, with_request: 45, 4;
    }
    /// Adapter watchdog register, written by the adapter monitor.
    AdapterWatchdog {
        /// Grows with every write.
        sequence, with_sequence: 0, 32;
        /// The adapter's [`Condition`].
        adapter, with_adapter: 32, 2;
        /// Six [`LinkState`]s of three bits, by direction.
        links, with_links: 34, 18;
        /// Sensor level of address translation.
        translation, with_translation: 52, 2;
        /// Sensor level of the card.
        card, with_card: 54, 2;
    }
    /// Remote fault descriptor of one direction, written by the adapter monitor.
    RemoteFault {
        /// Grows with every change.
        sequence, with_sequence: 0, 16;
        /// The neighbour host's [`Condition`].
        host, with_host: 16, 2;
        /// Whether the neighbour's service network is reachable.
        service, with_service: 18, 1;
        /// The neighbour adapter's [`Condition`].
        adapter, with_adapter: 19, 2;
        /// This link's [`LinkState`] as the neighbour sees it.
        link, with_link: 21, 3;
        /// Time of the last change (ms, wraps).
        changed, with_changed: 24, 40;
    }
    /// Diagnosis word of 16 bits in every packet, credit and idle frame.
    DiagnosisWord {
        /// The sender host's [`Condition`].
        host, with_host: 0, 2;
        /// Whether the sender's service network is reachable.
        service, with_service: 2, 1;
        /// The sender adapter's [`Condition`].
        adapter, with_adapter: 3, 2;
        /// Whether this link works as the sender sees it: 2 up; the other codes are reserved.
        link, with_link: 5, 2;
        /// Whether a flooded report waits: reserved, as node processes flood none.
        report, with_report: 7, 1;
        /// Grows with every change.
        sequence, with_sequence: 8, 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_register_do_not_overlap() {
        for register in ["HostWatchdog", "AdapterWatchdog", "RemoteFault", "DiagnosisWord"] {
            let mut used = 0_u64;
            for field in FIELDS.iter().filter(|field| field.register == register) {
                let mask = ((1_u64 << field.bits) - 1) << field.shift;
                assert_eq!(used & mask, 0, "{field:?}");
                used |= mask;
            }
            assert!(used > 0);
            assert!(register != "DiagnosisWord" || used < 1 << 16);
        }
    }

    #[test]
    fn a_field_keeps_the_others() {
        let word = HostWatchdog(u64::MAX).with_service(0);
        assert_eq!((word.service(), word.host(), word.memory()), (0, 3, 3));
        assert_eq!(word.with_service(7).0, u64::MAX);
        assert_eq!(Condition::from_code(77), Condition::Failed);
        assert_eq!(LinkState::from_code(7), LinkState::Broken);
    }
}
