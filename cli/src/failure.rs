//! How a command fails: what happened, what to do next, and the exit code.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use millrace_client::Error;
use millrace_types::Reason;

/// The exit codes, as `--help` prints them.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed
  2  bad usage: an option, a setting or an input file cannot be used; nothing was sent
  3  not found
  4  no server could be reached
  5  timed out";

/// Why the process ends, for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Failed = 1,
    Usage = 2,
    NotFound = 3,
    Unreachable = 4,
    TimedOut = 5,
}

/// A command's failure.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// `None` when there is nobody left to tell.
    pub(crate) message: Option<String>,
    pub(crate) hint: Option<String>,
}

impl Failure {
    fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: Some(message.into()), hint: None }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(Exit::NotFound, message)
    }

    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Self::new(Exit::Unreachable, message)
    }

    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self::new(Exit::TimedOut, message)
    }

    /// Whoever read our output has gone: end quietly.
    pub(crate) fn reader_gone() -> Self {
        Self { exit: Exit::Failed, message: None, hint: None }
    }

    /// What was told of already: only the exit code is left.
    pub(crate) fn told(exit: Exit) -> Self {
        Self { exit, message: None, hint: None }
    }

    /// Adds the next step, in place of a more general one.
    #[must_use]
    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Puts what it is about in front of the message.
    #[must_use]
    pub(crate) fn about(self, subject: impl std::fmt::Display) -> Self {
        Self { message: self.message.map(|message| format!("{subject}: {message}")), ..self }
    }

    /// Tells stderr and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        let colour = std::io::stderr().is_terminal() && !no_colour();
        let mut text = String::new();
        if let Some(message) = &self.message {
            text += &format!("{} {message}\n", paint("error:", "1;31", colour));
        }
        if let Some(hint) = &self.hint {
            text += &format!("{} {hint}\n", paint("hint:", "1;36", colour));
        }
        // A stderr that is gone leaves only the exit code to speak.
        std::io::stderr().write_all(text.as_bytes()).ok();
        ExitCode::from(self.exit as u8)
    }
}

/// Whether `NO_COLOR` asks for plain text (<https://no-color.org>).
pub(crate) fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

fn paint(text: &str, code: &str, colour: bool) -> String {
    if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match &error {
            Error::Unreachable { .. } => Exit::Unreachable,
            Error::TimedOut { .. } => Exit::TimedOut,
            Error::File { .. } | Error::Tensor(_) | Error::NoEndpoints => Exit::Usage,
            _ => match error.reason() {
                Some(
                    Reason::FunctionNotFound
                    | Reason::WorkflowNotFound
                    | Reason::RevisionNotFound
                    | Reason::ArtifactNotFound
                    | Reason::NodeNotFound
                    | Reason::OperationNotFound
                    | Reason::TraceNotFound
                    | Reason::SequenceNotFound,
                ) => Exit::NotFound,
                Some(Reason::TimedOut) => Exit::TimedOut,
                _ => Exit::Failed,
            },
        };
        let message = match error.reason() {
            Some(reason) => format!("{error} ({reason})"),
            None => error.to_string(),
        };
        Self { exit, message: Some(message), hint: next_step(&error) }
    }
}

fn next_step(error: &Error) -> Option<String> {
    let hint = match error {
        Error::Unreachable { .. } => {
            "start a cluster here with 'millrace up', or name one with --endpoint or MILLRACE_ENDPOINTS"
        }
        Error::ConnectionLost { .. } => "it may have been carried out all the same: look before trying again",
        Error::TimedOut { .. } => "give it longer with --timeout, or see what the GPUs do: millrace ps",
        _ => match error.reason()? {
            Reason::FunctionNotFound => "see what there is: millrace get functions --all-tenants",
            Reason::WorkflowNotFound => "see what there is: millrace get workflows --all-tenants",
            Reason::NameTaken => "functions and workflows share their names: choose another",
            Reason::InUse => "see what runs it, and delete that first: millrace get workflows -o wide",
            Reason::RevisionNotFound => "see its revisions: millrace describe function NAME",
            Reason::SequenceNotFound => "begin it anew: --sequence-start, or the parameter sequence_start",
            Reason::FunctionDisabled => "it was unloaded: load it through the repository API",
            Reason::FunctionNotReady => "see what it waits for: millrace describe function NAME",
            Reason::InvalidInput | Reason::InvalidOutput => {
                "see what it takes and gives: millrace describe function NAME, or workflow NAME"
            }
            Reason::QueueFull | Reason::ByteBudgetExceeded | Reason::NoGpuMemory => {
                "the cluster is full: try again in a moment, or send less at a time"
            }
            Reason::StorageFull => {
                "free space on the controllers' disks, or delete functions: unused models are removed after an hour"
            }
            Reason::NoWorker => "see the nodes: millrace get nodes",
            Reason::NoLeader => "see which controllers are up: millrace cluster status",
            Reason::ShuttingDown => "try again in a moment",
            Reason::MembershipRefused => "see the group: millrace cluster status -o wide",
            Reason::NodeNotFound | Reason::NodeState => "see the nodes: millrace get nodes",
            Reason::TimedOut => "give it longer with --timeout, or see what the GPUs do: millrace ps",
            Reason::Conflict => "someone else changed it: read it again, then repeat",
            _ if error.retryable() => "the same call may succeed when repeated",
            _ => return None,
        },
    };
    Some(hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::Failure as ServerFailure;

    fn refused(reason: Reason) -> Failure {
        Error::Refused(ServerFailure::new(reason, "what happened")).into()
    }

    #[test]
    fn exit_codes_tell_kinds_of_failure_apart() {
        assert_eq!(refused(Reason::FunctionNotFound).exit, Exit::NotFound);
        assert_eq!(refused(Reason::WorkflowNotFound).exit, Exit::NotFound);
        assert_eq!(refused(Reason::TimedOut).exit, Exit::TimedOut);
        assert_eq!(refused(Reason::QueueFull).exit, Exit::Failed);
        assert_eq!(Failure::from(Error::NoEndpoints).exit, Exit::Usage);
    }

    #[test]
    fn a_server_error_keeps_its_reason_and_every_retryable_one_has_a_hint() {
        for &reason in Reason::ALL {
            let failure = refused(reason);
            assert_eq!(failure.message, Some(format!("what happened ({reason})")));
            assert!(failure.hint.is_some() || !reason.retryable(), "{reason}");
        }
    }

    #[test]
    fn help_names_every_code() {
        for exit in [Exit::Failed, Exit::Usage, Exit::NotFound, Exit::Unreachable, Exit::TimedOut] {
            assert!(EXIT_CODES.contains(&format!("\n  {}  ", exit as u8)));
        }
    }
}
