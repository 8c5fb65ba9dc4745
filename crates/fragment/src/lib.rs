//! Detector fragments on disk (stream files) and on the wire (multi-fragment packets).
