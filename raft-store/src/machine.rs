//! What the store asks of a replicated state machine, and the cluster's state as one.

use std::error::Error;
use std::fmt::Debug;
use std::io::{self, Read, Write};

use millrace_cluster_state::{DecodeError, KnownRules, Outcome, Proposal, State, UnknownRules};
use millrace_types::Digest;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A deterministic state machine that lives in memory.
///
/// `Clone` must be cheap (persistent maps): every applied batch publishes a clone to the readers,
/// and a snapshot is taken from one.
pub trait Machine: Clone + Default + Send + Sync + 'static {
    /// A replicated command. A log entry holds a batch of them.
    type Command: Serialize + DeserializeOwned + Clone + Debug + Send + Sync + 'static;
    /// What applying a command answers to whoever proposed it.
    type Outcome: Serialize + DeserializeOwned + Debug + Send + Sync + 'static;
    /// Why some bytes are no state.
    type DecodeError: Error + Send + Sync + 'static;

    /// Refuses a command that this build cannot apply to this state as every other build does.
    ///
    /// # Errors
    /// [`UnknownRules`], by which the store halts.
    fn check_rules(&self, command: &Self::Command) -> Result<(), UnknownRules>;

    /// Applies one command of the entry at `index`. Reads nothing but its arguments.
    fn apply(&mut self, index: u64, command: &Self::Command) -> Self::Outcome;

    /// Writes the state as bytes, with a format version of its own: the same bytes each time.
    ///
    /// # Errors
    /// Those of the writer.
    fn write_to(&self, out: &mut dyn Write) -> io::Result<()>;

    /// The digest of the [written](Self::write_to) state.
    fn digest(&self) -> Digest;

    /// Reads what [`Self::write_to`] wrote.
    ///
    /// # Errors
    /// When the bytes are of another format, damaged, or a state that no log gives.
    fn read_from(from: &mut dyn Read) -> Result<Self, Self::DecodeError>;
}

impl Machine for State {
    type Command = Proposal;
    type Outcome = Outcome;
    type DecodeError = DecodeError;

    fn check_rules(&self, command: &Proposal) -> Result<(), UnknownRules> {
        Self::check_rules(self, KnownRules::THIS_BUILD, command)
    }

    fn apply(&mut self, index: u64, command: &Proposal) -> Outcome {
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
