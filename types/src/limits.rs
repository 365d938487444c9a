//! The named bounds of the replicated state and of the lists that show it. The table [`ALL`] and
//! the constants come from a single macro call. `docs/operate/limits.md` shows the same table, and a
//! test compares the two.
//!
//! The leading controller checks a write against these bounds before the write reaches Raft, and
//! every replica checks the write again when it applies the command. State that only a worker or a
//! controller keeps is bounded by constants beside that state.

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateLimit {
    /// The name of the constant, which refusals mention.
    pub name: &'static str,
    /// The value, in `unit`.
    pub value: usize,
    /// The unit of the value.
    pub unit: LimitUnit,
    /// The bounded quantity, in words.
    pub bounded: &'static str,
}

/// The unit of a [`StateLimit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitUnit {
    /// A number of items.
    Items,
    /// A number of bytes: of UTF-8 for text, of the snapshot encoding for records.
    Bytes,
}

macro_rules! limits {
    ($($name:ident = $value:expr, $unit:ident, $bounded:literal;)*) => {
        $(#[doc = $bounded] pub const $name: usize = $value;)*

        /// All limits, in the order of the documentation.
        pub const ALL: &[StateLimit] = &[
            $(StateLimit { name: stringify!($name), value: $name, unit: LimitUnit::$unit, bounded: $bounded },)*
        ];
    };
}

limits! {
    STATE_BYTES_MAX = 1 << 30, Bytes, "The replicated state. At the limit, only commands that delete or end something are accepted.";
    DEFINITIONS_BYTES_MAX = 512 << 20, Bytes, "Functions, workflows, model summaries and caps of all tenants together.";
    TENANT_BYTES_MAX = 64 << 20, Bytes, "Functions, workflows and caps of one tenant.";
    CHECKPOINTS_BYTES_MAX = 256 << 20, Bytes, "Checkpoints of all nodes together. Items beyond the limit are counted and not stored.";
    FUNCTIONS_MAX = 100_000, Items, "Functions of a cluster.";
    REVISIONS_KEPT = 10, Items, "Newest revisions kept of a function, with their artifacts.";
    WORKFLOWS_MAX = 10_000, Items, "Workflows of a cluster.";
    WORKFLOWS_PER_TENANT_MAX = 1_000, Items, "Workflows of a tenant: a change of a function checks each of them again.";
    ARTIFACTS_MAX = 100_000, Items, "Model files and programs of a cluster.";
    TENANTS_MAX = 10_000, Items, "Tenants that have caps.";
    NODES_MAX = 4_096, Items, "Nodes, lost ones included.";
    PLACEMENTS_MAX = 1_000_000, Items, "Placements of functions on nodes.";
    SLICES_PER_GPU_MAX = 15, Items, "Slices of a GPU: one seat more than slices can then always be at work.";
    SLICES_PER_NODE_MAX = 400, Items, "Slices on the GPUs of a node, so that a single change has room for all of them.";
    PROFILES_PER_ARTIFACT_MAX = 8, Items, "Types of GPUs with a profile of a model. The oldest profile is forgotten first.";
    POLICIES_KEPT = 20, Items, "Newest policies kept.";
    OPERATIONS_MAX = 256, Items, "Operations kept after their end, and at one time, changes of the controller group and profiles.";
    SESSIONS_MAX = 10_000, Items, "Idempotency keys kept. The longest unused is forgotten first.";
    RETIRED_MAX = 10_000, Items, "Deleted functions and workflows with their revision numbers.";
    FORGOTTEN_TENANTS_MAX = 10_000, Items, "Tenants that are billed separately for their forgotten functions.";
    LOST_ENTRIES_MAX = 262_144, Items, "Lost pieces of data kept in the index. The oldest lost piece is forgotten first.";
    INDEX_ENTRIES_PER_NODE_MAX = 131_072, Items, "Index entries of a node. Further entries are only counted.";
    MODELS_PER_NODE_MAX = 16_384, Items, "Model locations of a node. Further locations are only counted.";
    COMMAND_BYTES_MAX = 128 << 10, Bytes, "One change, as the log encodes it.";
    SPEC_BYTES_MAX = 64 << 10, Bytes, "The spec of a function.";
    LABELS_MAX = 64, Items, "Labels of a function or workflow.";
    LABEL_LEN_MAX = 253, Bytes, "The key of a label, and its value.";
    STATES_MAX = 16, Items, "Pairs of state tensors of a function.";
    STEPS_MAX = 64, Items, "Steps of a workflow.";
    PORTS_MAX = 64, Items, "Inputs of a workflow, and outputs.";
    TENSORS_MAX = 1_024, Items, "Inputs of a model, and outputs.";
    TENSOR_NAME_BYTES_MAX = 256, Bytes, "The name of a tensor, in models, state pairs and workflows.";
    RANK_MAX = 32, Items, "Dimensions of a tensor that a model declares.";
    DIM_NAME_BYTES_MAX = 320, Bytes, "The name of a free dimension.";
    NODE_TEXT_BYTES_MAX = 256, Bytes, "A worker's address, instance, topology or type of GPU.";
    NODE_GPUS_MAX = 256, Items, "GPUs of a node.";
    CALLER_BYTES_MAX = 256, Bytes, "The name of the caller that requests a change.";
    IDEMPOTENCY_KEY_BYTES_MAX = 128, Bytes, "An idempotency key.";
    REFUSAL_BYTES_MAX = 2 << 10, Bytes, "The stored reason of a refusal or of a failed operation. A longer reason is cut.";
    PAGE_ITEMS_MAX = 1_000, Items, "Items on a page of a list.";
    PAGE_BYTES_MAX = 1 << 20, Bytes, "A page of a list, encoded. A larger item is alone on its page.";
    INDEX_BYTES_MAX = 16 << 20, Bytes, "The repository index, or the statistics, of a tenant's models: the protocol has no pages for them.";
    ANSWER_BYTES_MAX = 4 << 20, Bytes, "A response of the admin API, which clients accept up to the same size.";
}

// The table holds a gibibyte in a `usize`, so builds for 32-bit targets are refused.
const _: () = assert!(usize::BITS >= 64, "bounds are written for 64-bit targets");
const _: () = assert!(
    REVISIONS_KEPT * COMMAND_BYTES_MAX + SPEC_BYTES_MAX + PAGE_BYTES_MAX < ANSWER_BYTES_MAX,
    "the largest function fits an answer"
);

/// Returns the longest prefix of a text that has at most `bytes_max` bytes and ends at a character
/// boundary.
#[must_use]
pub fn text_prefix(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn shown(limit: &StateLimit) -> String {
        let StateLimit { value, unit, .. } = *limit;
        match unit {
            LimitUnit::Items => {
                let digits = value.to_string();
                let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().collect();
                groups.iter().map(|group| String::from_utf8_lossy(group)).collect::<Vec<_>>().join(",")
            }
            LimitUnit::Bytes if value.is_multiple_of(1 << 30) => format!("{} GiB", value >> 30),
            LimitUnit::Bytes if value.is_multiple_of(1 << 20) => format!("{} MiB", value >> 20),
            LimitUnit::Bytes if value.is_multiple_of(1 << 10) => format!("{} KiB", value >> 10),
            LimitUnit::Bytes => format!("{value} B"),
        }
    }

    #[test]
    fn the_operating_page_lists_every_limit_with_its_value() {
        let mut table = String::new();
        for limit in ALL {
            writeln!(table, "| `{}` | {} | {} |", limit.name, shown(limit), limit.bounded).expect("a string");
        }
        let page = include_str!("../../docs/operate/limits.md");
        assert!(page.contains(&table), "docs/operate/limits.md differs from this table:\n{table}");
    }

    #[test]
    fn a_cut_text_ends_with_a_whole_character() {
        assert_eq!((text_prefix("äbc", 4), text_prefix("äbc", 3), text_prefix("äbc", 1)), ("äbc", "äb", ""));
    }
}
