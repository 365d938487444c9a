//! One GPU behind one trait, the memory that workers share with executors, and topologies as data.
//!
//! | module | holds | used by |
//! |---|---|---|
//! | [`api`] | [`Device`] and [`Stream`]: what an executor asks of a GPU | executor |
//! | [`emulated`] | the implementation that needs no GPU: memory is a memfd, launches run on the CPU with rten | executor |
//! | [`memory`] | [`DeviceMemory`] and [`HostRegion`]: the memfds that a worker owns and executors receive | worker |
//! | [`topology`] | presets of GPUs and links | worker, sim |
//! | [`clock`] | CLOCK_MONOTONIC and the windows of grants | both |
//! | [`probe`] | how fast copies are, by their size | the executor's bench alone |
//! | [`ranges`] | sets of byte ranges: what of a model is loaded | both |
//!
//! With `client/function` this is the only crate with unsafe code: in `map` (address space) and `pod`
//! (elements as bytes), and in the three places of `emulated` that build on them.
//!
//! # What was tried on hardware
//! Nothing yet. The trait follows the CUDA driver's virtual memory calls (each method names its
//! own), so that a `cuda` implementation adds a module and changes no caller, but no GPU has run
//! it: only the emulated device exists and is tested.

#![warn(missing_docs)]

pub mod api;
pub mod clock;
pub mod emulated;
mod error;
mod map;
mod memfd;
pub mod memory;
mod pod;
pub mod probe;
pub mod ranges;
pub mod topology;

pub use api::{
    Arg, Capabilities, Code, Contents, Device, Event, Extent, Fault, HostTensor, KernelSpec, Part, Source,
    Stream, Width,
};
pub use clock::{Start, Window, monotonic_now};
pub use error::Error;
pub use memory::{Access, DeviceMemory, HostRegion, HostRegionBuilder, Pinned};
pub use ranges::RangeSet;
