//! The trait of a replicated state machine, and its implementation for the cluster's state.

use std::error::Error;
use std::fmt::Debug;
use std::io::{self, Read, Write};

use millrace_cluster_state::{CommandOutcome, DecodeError, KnownRules, Proposal, State, UnknownRules};
use millrace_types::Digest;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A deterministic state machine that lives in memory.
///
/// `Clone` must be cheap (persistent maps): every applied batch publishes a clone to the readers,
/// and a snapshot is built from a clone.
pub trait StateMachine: Clone + Default + Send + Sync + 'static {
    /// A replicated command. A log entry holds a batch of commands.
    type Command: Serialize + DeserializeOwned + Clone + Debug + Send + Sync + 'static;
    /// The result of a command, which its proposer receives.
    type Outcome: Serialize + DeserializeOwned + Debug + Send + Sync + 'static;
    /// The reason why bytes are not a valid state.
    type DecodeError: Error + Send + Sync + 'static;

    /// Refuses a command if this build could apply it differently from other builds.
    ///
    /// # Errors
    /// [`UnknownRules`]; the store then halts.
    fn check_rules(&self, command: &Self::Command) -> Result<(), UnknownRules>;

    /// Applies a command of the entry at `index`. Must depend only on the state and the arguments.
    fn apply(&mut self, index: u64, command: &Self::Command) -> Self::Outcome;

    /// Writes the state in an encoding with its own format version. Equal states give equal bytes.
    ///
    /// # Errors
    /// The errors of the writer.
    fn write_to(&self, out: &mut dyn Write) -> io::Result<()>;

    /// Returns the digest of the [written](Self::write_to) state.
    fn digest(&self) -> Digest;

    /// Reads a state that [`Self::write_to`] wrote.
    ///
    /// # Errors
    /// If the bytes are of another format or damaged, or if no log leads to the state.
    fn read_from(from: &mut dyn Read) -> Result<Self, Self::DecodeError>;
}

impl StateMachine for State {
    type Command = Proposal;
    type Outcome = CommandOutcome;
    type DecodeError = DecodeError;

    fn check_rules(&self, command: &Proposal) -> Result<(), UnknownRules> {
        Self::check_rules(self, KnownRules::THIS_BUILD, command)
    }

    fn apply(&mut self, index: u64, command: &Proposal) -> CommandOutcome {
        Self::apply(self, index, command)
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        Self::write_to(self, out)
    }

    fn digest(&self) -> Digest {
        Self::digest(self)
    }

    fn read_from(from: &mut dyn Read) -> Result<Self, DecodeError> {
        Self::read_from(from)
    }
}
