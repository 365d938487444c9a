//! The circumstances of a command.

use crate::caller::CallerName;
use crate::time::UnixMillis;

/// The inputs of a command besides the state and the command's own fields.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommandContext<'a> {
    pub(crate) now: UnixMillis,
    pub(crate) caller: &'a CallerName,
}
