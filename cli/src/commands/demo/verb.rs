//! The arguments of the verbs that the demo runs.

use crate::failure::CommandFailure;

/// Parses a verb's arguments, as if a user had typed them.
pub(super) fn verb<A: clap::Args>(words: &[&str]) -> Result<A, CommandFailure> {
    let command = A::augment_args(clap::Command::new("verb").no_binary_name(true));
    let matches = command.try_get_matches_from(words);
    matches.and_then(|matches| A::from_arg_matches(&matches)).map_err(|error| {
        CommandFailure::failed(format!("the demo passed an argument that the verb does not accept: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::{apply, ps};

    #[test]
    fn the_demo_passes_arguments_that_the_verbs_accept() {
        assert!(verb::<apply::Args>(&["-f", "x.yaml"]).is_ok());
        assert!(verb::<ps::Args>(&[]).is_ok());
        assert!(verb::<ps::Args>(&["--nonsense"]).is_err());
    }
}
