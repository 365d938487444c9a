//! A strict double of the CUDA driver (libcuda.so.1) over host memory, for tests without a GPU.
//!
//! A handle is a memfd, a mapping is an `mmap`, access is `mprotect`, an export is a descriptor, and a
//! stream is a thread. The addresses of the GPU are addresses of this process. Kernels are those of
//! `kernels.ptx`, by Rust bodies.
//!
//! | module | holds |
//! |---|---|
//! | `context` | the start, the GPU and its primary context |
//! | `handle` | physical memory, its export and import |
//! | `memory` | address ranges and mappings |
//! | `host` | pinned and registered host memory |
//! | `stream` | streams, their threads, and copies |
//! | `event` | events and waits |
//! | `launch` | modules, functions and launches |
//! | `green` | sets of SMs and green contexts |
//! | `graph` | capture and replay of launches |
//! | `report` | the counts, and the values that were left at exit |
//! | `state` | all values behind a lock, and the frame of a call |
//! | `mappings`, `work`, `kernels` | parts of the state: memory, queued work, the bodies of the kernels |
//! | `faults` | the errors that a test asks for |
//! | `rule` | refusals of calls, and broken rules |
//!
//! The double is stricter than a driver: a broken rule answers an error and prints a line
//! `cuda double: CALL: rule`. What would corrupt memory on a GPU ends the process: unmapping memory that
//! queued work names, destroying a stream with queued work, waiting for an event before its recording.
//!
//! | variable | effect |
//! |---|---|
//! | `MILLRACE_DOUBLE_MEMORY` | bytes of the GPU's memory, 1 GiB by default |
//! | `MILLRACE_DOUBLE_SEED` | streams wait at random before work, by this seed |
//! | `MILLRACE_DOUBLE_FAULT` | `NAME:N:CODE`, comma separated: the Nth call of NAME answers CODE |
//! | `MILLRACE_DOUBLE_REPORT` | file for the report in JSON, written at exit |
//!
//! The double shows no speed, no PTX, no implicit synchronization, and no coherence of a real GPU.

mod context;
mod event;
mod faults;
mod graph;
mod green;
mod handle;
mod host;
mod kernels;
mod launch;
mod mappings;
mod memory;
mod report;
mod rule;
mod state;
mod stream;
mod work;
