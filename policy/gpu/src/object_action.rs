//! Actions on objects of intermediate data.

use millrace_core::decision_text::DecisionText;
use millrace_core::ids::ObjectKey;
use millrace_memory::BlockRun;

/// An action on an object of intermediate data on the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ObjectAction {
    /// Write the object from the producer to the blocks, in the given order.
    Place {
        object: ObjectKey,
        /// The destination blocks.
        blocks: Vec<BlockRun>,
    },
    /// Copy the object from its producer to the host.
    Refuse { object: ObjectKey },
    /// The store does not take the object: copy the object to the host. No further action will name
    /// the object.
    Decline { object: ObjectKey },
    /// Copy the object to the host. Runs can read it on the GPU until then.
    Migrate { object: ObjectKey },
    /// The object is only on the host from now on. Its blocks have not yet been given to another
    /// owner.
    Left { object: ObjectKey },
    /// The object stays on the GPU: its copy on the host may be dropped.
    Keep { object: ObjectKey },
    /// Copy the object from the host to these blocks.
    Reload {
        object: ObjectKey,
        /// The destination blocks.
        blocks: Vec<BlockRun>,
    },
    /// Drop every copy of the object.
    Free { object: ObjectKey },
    /// The object exists nowhere any longer.
    Lost { object: ObjectKey },
}

impl ObjectAction {
    /// Returns the action as a decision of the canonical text.
    pub(super) fn decision(&self) -> Option<DecisionText> {
        let (name, object) = match self {
            Self::Place { object, .. } => ("keep on the GPU", object),
            Self::Refuse { object } | Self::Decline { object } => ("keep on the host", object),
            Self::Migrate { object } => ("migrate", object),
            Self::Reload { object, .. } => ("reload", object),
            Self::Free { object } => ("free", object),
            Self::Left { .. } | Self::Keep { .. } | Self::Lost { .. } => return None,
        };
        Some(DecisionText::new(name).object(*object))
    }
}
