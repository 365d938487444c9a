//! Loaded models.
//!
//! | module | holds |
//! |---|---|
//! | `loaded_program` | a loaded model: its launches, and the memory under it |
//! | `launch_plan` | launches with numbered values. Pure |

pub(crate) mod launch_plan;
pub(crate) mod loaded_program;
