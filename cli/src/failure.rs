//! The failure of a command: the message, the next step and the exit code.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use millrace_client::Error;
use millrace_types::Reason;

/// The exit codes in the text of `--help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed
  2  bad usage: an option, a setting or an input file is invalid; nothing was sent
  3  not found
  4  no server could be reached
  5  timed out";

/// The exit code of the process, for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    Failed = 1,
    Usage = 2,
    NotFound = 3,
    Unreachable = 4,
    TimedOut = 5,
}

/// The failure of a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommandFailure {
    pub(crate) exit: ExitStatus,
    /// The error message. `None` if the reader of the output is gone, or the command printed the
    /// failure itself.
    pub(crate) message: Option<String>,
    pub(crate) hint: Option<String>,
}

impl CommandFailure {
    fn new(exit: ExitStatus, message: impl Into<String>) -> Self {
        Self { exit, message: Some(message.into()), hint: None }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Failed, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Usage, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::NotFound, message)
    }

    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Unreachable, message)
    }

    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::TimedOut, message)
    }

    /// The reader of the output closed the pipe: exit without a message.
    pub(crate) fn reader_gone() -> Self {
        Self { exit: ExitStatus::Failed, message: None, hint: None }
    }

    /// The command has already printed the failure: only the exit code is left.
    pub(crate) fn already_printed(exit: ExitStatus) -> Self {
        Self { exit, message: None, hint: None }
    }

    /// Sets the next step, in place of a more general one.
    #[must_use]
    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Puts the subject in front of the message.
    #[must_use]
    pub(crate) fn about(self, subject: impl std::fmt::Display) -> Self {
        Self { message: self.message.map(|message| format!("{subject}: {message}")), ..self }
    }

    /// Prints the failure to stderr and returns the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        let colour = std::io::stderr().is_terminal() && !no_colour();
        let mut text = String::new();
        if let Some(message) = &self.message {
            text += &format!("{} {message}\n", paint("error:", "1;31", colour));
        }
        if let Some(hint) = &self.hint {
            text += &format!("{} {hint}\n", paint("hint:", "1;36", colour));
        }
        // If stderr is closed, the exit code is the only report.
        std::io::stderr().write_all(text.as_bytes()).ok();
        ExitCode::from(self.exit as u8)
    }
}

/// Returns whether `NO_COLOR` asks for plain text (<https://no-color.org>).
pub(crate) fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

fn paint(text: &str, code: &str, colour: bool) -> String {
    if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

impl From<Error> for CommandFailure {
    fn from(error: Error) -> Self {
        let exit = match &error {
            Error::Unreachable { .. } => ExitStatus::Unreachable,
            Error::TimedOut { .. } => ExitStatus::TimedOut,
            Error::File { .. } | Error::Tensor(_) | Error::NoEndpoints => ExitStatus::Usage,
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
                ) => ExitStatus::NotFound,
                Some(Reason::TimedOut) => ExitStatus::TimedOut,
                _ => ExitStatus::Failed,
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
        Error::ConnectionLost { .. } => "the call may have been carried out: check before you repeat it",
        Error::TimedOut { .. } => "allow more time with --timeout, or see the GPUs' load: millrace ps",
        _ => match error.reason()? {
            Reason::FunctionNotFound => "list all functions: millrace get functions --all-tenants",
            Reason::WorkflowNotFound => "list all workflows: millrace get workflows --all-tenants",
            Reason::NameTaken => "functions and workflows share their names: choose another name",
            Reason::InUse => {
                "find the workflow that runs it, and delete that workflow first: millrace get workflows -o wide"
            }
            Reason::RevisionNotFound => "list the function's revisions: millrace describe function NAME",
            Reason::SequenceNotFound => {
                "start the sequence again: --sequence-start, or the parameter sequence_start"
            }
            Reason::FunctionDisabled => "the function was unloaded: load it through the repository API",
            Reason::FunctionNotReady => "see the function's conditions: millrace describe function NAME",
            Reason::InvalidInput | Reason::InvalidOutput => {
                "see the declared inputs and outputs: millrace describe function NAME, or workflow NAME"
            }
            Reason::QueueFull | Reason::ByteBudgetExceeded | Reason::NoGpuMemory => {
                "the cluster is full: try again in a moment, or send fewer or smaller requests"
            }
            Reason::StorageFull => {
                "free space on the controllers' disks, or delete functions: unused models are removed after an hour"
            }
            Reason::NoWorker => "list the nodes: millrace get nodes",
            Reason::NoLeader => "list the controllers that are up: millrace cluster status",
            Reason::ShuttingDown => "try again in a moment",
            Reason::MembershipRefused => "list the controllers: millrace cluster status -o wide",
            Reason::NodeNotFound | Reason::NodeState => "list the nodes: millrace get nodes",
            Reason::TimedOut => "allow more time with --timeout, or see the GPUs' load: millrace ps",
            Reason::Conflict => "another client changed the resource: read it again, then repeat the change",
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

    fn refused(reason: Reason) -> CommandFailure {
        Error::Refused(ServerFailure::new(reason, "what happened")).into()
    }

    #[test]
    fn exit_codes_distinguish_the_kinds_of_failure() {
        assert_eq!(refused(Reason::FunctionNotFound).exit, ExitStatus::NotFound);
        assert_eq!(refused(Reason::WorkflowNotFound).exit, ExitStatus::NotFound);
        assert_eq!(refused(Reason::TimedOut).exit, ExitStatus::TimedOut);
        assert_eq!(refused(Reason::QueueFull).exit, ExitStatus::Failed);
        assert_eq!(CommandFailure::from(Error::NoEndpoints).exit, ExitStatus::Usage);
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
    fn the_help_text_names_every_exit_code() {
        for exit in [
            ExitStatus::Failed,
            ExitStatus::Usage,
            ExitStatus::NotFound,
            ExitStatus::Unreachable,
            ExitStatus::TimedOut,
        ] {
            assert!(EXIT_CODES.contains(&format!("\n  {}  ", exit as u8)));
        }
    }
}
