//! The event builder: a sans-IO core and the processes around it.
