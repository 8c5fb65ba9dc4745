//! The soft RDMA device: protection domains, memory regions, completion queues, queue pairs.
