//! The network side of a card: its clients, the listening port, and the DMA engine that copies between cards.

pub(crate) mod clients;
pub(crate) mod dma;
pub(crate) mod port;
