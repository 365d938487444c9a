//! A GPU behind a trait, the memory that workers share with executors, and topologies as data.
//!
//! | module | holds | used by |
//! |---|---|---|
//! | [`api`] | [`Device`] and [`Stream`]: the GPU interface that an executor uses | executor |
//! | [`emulated`] | the implementation that needs no GPU: memory is a memfd | executor, engine |
//! | [`cuda`] | the implementation over the CUDA driver | executor, engine |
//! | [`check`] | the checks that a GPU must pass, for `gpu-check` | `gpu-check` |
//! | [`memfd`] | reads and writes files in memory | executor, engine |
//! | [`memory`] | [`DeviceMemory`] and [`HostRegion`]: the memfds that a worker owns and executors receive | worker, executor, engine |
//! | [`nvml`] | discovery and health of NVIDIA GPUs, through the driver's management library | worker |
//! | [`topology`] | presets of GPUs and links | worker, sim |
//! | [`clock`] | CLOCK_MONOTONIC and the time windows of grants | worker, executor |
//! | [`probe`] | measurement of the copy rate by size of a copy | executor, `gpu-check` |
//! | [`ranges`] | sets of byte ranges, for example the loaded bytes of a model | executor, engine |
//!
//! The unsafe code is in `map` (address space and shared atomics), in `emulated/region.rs`, which builds
//! on it, in `cuda` and `check` (calls of the driver), and in `nvml/raw.rs` (calls of NVML).
//!
//! # Tests on hardware
//! `gpu-check` runs [`check`] on a machine with a GPU, and `docs/gpu.md` has the results of an H100.
//! The tests of `millrace-cuda-double` run the CUDA device on a double of the driver.

#![warn(missing_docs)]

pub mod api;
pub mod check;
pub mod clock;
pub mod cuda;
pub mod emulated;
mod error;
mod faults;
mod map;
pub mod memfd;
pub mod memory;
pub mod nvml;
pub mod probe;
pub mod ranges;
pub mod topology;

pub use api::{Capabilities, CopySource, Device, Event, InjectedFault, MemoryExtent, MissingBytes, Stream};
pub use clock::{StartDecision, StartWindow, monotonic_now};
pub use error::{DeviceLoss, DriverError, Error};
pub use memory::{DeviceMemory, HostAccess, HostRegion, HostRegionBuilder, PinState};
pub use ranges::RangeSet;
