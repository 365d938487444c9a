//! Flags of earlier versions. A command line that still has one is refused with the name of its
//! replacement.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::failure::Failure;

/// Each removed flag, and what to do in its place.
const FLAGS: [(&str, &str); 4] = [
    ("--gpu-memory-layout", LAYOUT),
    ("--gpu-memory-partition", LAYOUT),
    ("--gpu-memory-blocks", LAYOUT),
    ("--gpu-memory-buddy", LAYOUT),
];

const LAYOUT: &str = "omit it: GPU memory is always laid out by best fit, in which any free block serves";

/// Returns the refusal of a command line, if a removed flag is the reason why clap cannot parse it.
pub(crate) fn refusal(error: &clap::Error) -> Option<Failure> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    // clap names an unknown argument without the value that `=` joins to it, but not in all versions.
    let name = argument.split('=').next().unwrap_or(argument);
    let (flag, instead) = FLAGS.iter().find(|(flag, _)| *flag == name)?;
    Some(Failure::usage(format!("{flag} was removed")).hint(*instead))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn a_removed_flag_is_refused_with_its_replacement() {
        for (flag, instead) in FLAGS {
            for words in [vec![flag.to_owned(), "x".to_owned()], vec![format!("{flag}=x")]] {
                let line = ["millrace".to_owned(), "up".to_owned()].into_iter().chain(words);
                let refused = refusal(&Cli::try_parse_from(line).unwrap_err()).unwrap();
                assert_eq!(refused.message.as_deref(), Some(format!("{flag} was removed").as_str()));
                assert_eq!(refused.hint.as_deref(), Some(instead));
            }
        }
    }

    #[test]
    fn an_unknown_flag_is_left_to_clap() {
        let unknown = Cli::try_parse_from(["millrace", "up", "--gpu-memory-shape", "x"]).unwrap_err();
        assert!(refusal(&unknown).is_none());
    }
}
