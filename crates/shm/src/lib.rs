//! Shared memory between processes: memfds, mappings, rings, locks that survive the death of their holder.
