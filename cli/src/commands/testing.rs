//! Parses the options of a verb in tests.

use std::ffi::OsString;

use clap::{Args, Command, Error};

/// Parses the words of a command line after the verb.
pub(crate) fn options<A: Args>(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<A, Error> {
    let command = A::augment_args(Command::new("millrace").no_binary_name(true));
    A::from_arg_matches(&command.try_get_matches_from(words)?)
}
