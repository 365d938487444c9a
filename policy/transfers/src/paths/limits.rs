//! Bounds of the GPUs, links, flows and routes of a node.

/// GPUs of a node, at most.
pub const GPUS_MAX: usize = 64;
/// NVLinks of a node, at most; each direction counts. Of a switch, its ports count.
pub const LINKS_MAX: usize = 128;
/// Concurrent flows, at most.
pub const FLOWS_MAX: usize = 256;
/// Routes of one flow, at most. DGX-V100 has six NVLinks at a GPU.
pub const ROUTES_MAX: usize = 8;
