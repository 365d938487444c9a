//! Flags of earlier versions. A command line that still has one is refused with the name of its
//! replacement.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::failure::CommandFailure;

/// Each flag that a verb no longer has, and its replacement.
const FLAGS: [(&str, &str); 19] = [
    ("--dispatch", PRESET),
    (
        "--eviction",
        "name a preset when the cluster begins: --preset NAME; or replace the part: 'millrace policy set --eviction NAME'",
    ),
    ("--transfer-sharing", "set it for the cluster: 'millrace policy set --transfer-sharing NAME'"),
    ("--host-links", "set it for the cluster: 'millrace policy set --host-links WHICH'"),
    ("--prewarm", "omit it: workers always prewarm the models of likely next steps while memory is free"),
    ("--lookup", "omit it: the worker that made the data is always asked first"),
    ("--object-pool", "omit it: the pool of objects is always elastic"),
    (
        "--object-migration",
        "omit it: objects of the consumers furthest back in the queue are always evicted first",
    ),
    ("--topology", "name the emulated machine as the device: --device NAME"),
    (
        "--gpu-object-memory",
        "omit it: objects get at most --object-memory, and at most a quarter of each GPU",
    ),
    ("--allow-faults", "name the action: --allow faults"),
    ("--allow-processes", "of a worker or of 'up': --allow processes; a controller runs no programs"),
    (
        "--internal-connections-max",
        "of a controller or of 'up': --connections-max internal=N; a worker has no such port",
    ),
    (
        "--worker-connections-max",
        "of a worker or of 'up': --connections-max worker=N; a controller has no such port",
    ),
    ("--address-connections-max", "name the limit: --connections-max address=N"),
    ("--gpu-memory-layout", LAYOUT),
    ("--gpu-memory-partition", LAYOUT),
    ("--gpu-memory-blocks", LAYOUT),
    ("--gpu-memory-buddy", LAYOUT),
];

const PRESET: &str = "name a preset when the cluster begins: --preset unified, torpor, lalb-o3 or fifo; later, 'millrace policy set --preset NAME'. Baselines such as lb and native are in 'millrace sim'";
const LAYOUT: &str = "omit it: GPU memory is always laid out by best fit, in which any free block serves";

/// Returns the refusal of a command line, if a removed flag is the reason why clap cannot parse it.
pub(crate) fn refusal(error: &clap::Error) -> Option<CommandFailure> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    // clap names an unknown argument without the value after `=`, but not in all versions.
    let name = argument.split('=').next().unwrap_or(argument);
    let (flag, instead) = FLAGS.iter().find(|(flag, _)| *flag == name)?;
    Some(CommandFailure::usage(format!("{flag} was removed")).hint(*instead))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn a_removed_flag_is_refused_with_its_replacement() {
        for (flag, instead) in FLAGS {
            for words in [vec![flag.to_owned(), "9".to_owned()], vec![format!("{flag}=9")]] {
                let line = ["millrace".to_owned(), "up".to_owned()].into_iter().chain(words);
                let refused = refusal(&Cli::try_parse_from(line).unwrap_err()).unwrap();
                assert_eq!(refused.message.as_deref(), Some(format!("{flag} was removed").as_str()));
                assert_eq!(refused.hint.as_deref(), Some(instead), "{flag}");
            }
        }
    }

    #[test]
    fn an_unknown_flag_is_left_to_clap() {
        let unknown = Cli::try_parse_from(["millrace", "up", "--gpu-memory-shape", "x"]).unwrap_err();
        assert!(refusal(&unknown).is_none());
    }
}
