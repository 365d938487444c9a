//! The double of the CUDA driver: a `libcuda.so.1` over host memory, for tests only.
//!
//! A handle of physical memory is a memfd, a mapping is an `mmap` at the reserved address, and access is
//! `mprotect`. An exported handle is a descriptor of the memfd, so processes share memory, also when the
//! exporter was killed. A stream is a thread that carries out its work in order. The helper kernels of
//! `device/src/cuda/kernels.ptx` have Rust bodies.
//!
//! The double is stricter than a driver. A call that breaks a rule gets an error, and a line on stderr that
//! begins with `cuda double:`. A dangerous call, which a driver lets corrupt memory or lose work, aborts the
//! process with a message that names the call and the queued call that still needs the memory.
//!
//! | variable | meaning |
//! |---|---|
//! | `MILLRACE_DOUBLE_MEMORY` | memory of each device: bytes, or a number with KiB, MiB or GiB; 1GiB by default |
//! | `MILLRACE_DOUBLE_DEVICES` | number of devices, 1 to 8; 1 by default |
//! | `MILLRACE_DOUBLE_SEED` | seed of the delays before queued work; 0, the default, means no delays |
//! | `MILLRACE_DOUBLE_STRICT` | `0` reports dangerous calls, and does not abort the process |
//! | `MILLRACE_DOUBLE_FAULT` | faults, with commas between: `CALL:NTH:CODE`, or `CALL:NTH:CODE:late` for work that fails when it runs |
//! | `MILLRACE_DOUBLE_FAULT_ONCE` | a file that the first fault creates; while the file exists, no other fault occurs, and a lost device stays lost in new processes |
//! | `MILLRACE_DOUBLE_REPORT` | a file for the counters and leftovers at exit, as JSON; `%p` is the process id |
//! | `CUDA_VISIBLE_DEVICES` | as for the driver: indices, or UUIDs and their beginnings |
//!
//! Absent on purpose: speed, implicit synchronization (also that of the default stream), machine code, and
//! graphs of more than one stream.
#![allow(non_snake_case, reason = "the functions have the driver's names")]

#[macro_use]
mod exports;

mod calls;
mod codes;
mod config;
mod context;
mod copies;
mod event;
mod faults;
mod graph;
mod green;
mod host;
mod kernels;
mod mapping;
mod maps;
mod memory;
mod module;
mod report;
mod state;
mod stream;
mod work;
