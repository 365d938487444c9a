//! The GPU's memory: mapped regions, the objects in them, and kept outputs.
//!
//! | module | holds |
//! |---|---|
//! | `objects` | tensors in the GPU's memory that runs read in place |
//! | `mapping` | the memory under a program or an object: its region, and the users of the region |
//! | `object_reports` | events about an object, some of which wait until its memory is unmapped |
//! | `mapping_state` | the state of a mapping, and its users. Pure |
//! | `executor_state` | the state that all threads share: the engine, its kept outputs, and the sender of events |
//! | `kept_outputs` | outputs that stay on the GPU after their run |

pub(crate) mod executor_state;
pub(crate) mod kept_outputs;
pub(crate) mod mapping;
pub(crate) mod mapping_state;
pub(crate) mod object_reports;
pub(crate) mod objects;

pub use kept_outputs::RUNS_KEPT_MAX;
pub use objects::OBJECTS_MAX;
