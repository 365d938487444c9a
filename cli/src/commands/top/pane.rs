//! The panes of `top`, and their columns.

use super::table::{ColumnWidth, PaneColumn};

/// A pane of `top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pane {
    Gpus,
    Functions,
    Links,
    Events,
}

impl Pane {
    pub(super) const ALL: [Self; 4] = [Self::Gpus, Self::Functions, Self::Links, Self::Events];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpus => "GPUs",
            Self::Functions => "Functions",
            Self::Links => "Links",
            Self::Events => "Events",
        }
    }
}

const fn words(heading: &'static str, width: u16) -> PaneColumn {
    PaneColumn { heading, width: ColumnWidth::Words(width) }
}

const fn number(heading: &'static str, width: u16) -> PaneColumn {
    PaneColumn { heading, width: ColumnWidth::Number(width) }
}

const fn rest(heading: &'static str, part: u16) -> PaneColumn {
    PaneColumn { heading, width: ColumnWidth::Rest(part) }
}

pub(super) const GPUS: &[PaneColumn] = &[
    rest("NODE", 2),
    number("GPU", 3),
    words("STATE", 10),
    words("MEMORY", 14),
    number("MODELS", 6),
    number("BUSY", 5),
    number("SWAPS/S", 8),
    number("EVICT/S", 8),
    number("RESTARTS", 8),
    words("SMS", 16),
    rest("RUNNING", 3),
];
pub(super) const FUNCTIONS: &[PaneColumn] = &[
    rest("FUNCTION", 1),
    number("REQ/S", 8),
    number("FAIL/S", 7),
    number("P50", 8),
    number("P98", 8),
    words("OBJECTIVE", 13),
    number("IN TIME", 8),
    number("DUE", 7),
    number("FLIGHT", 6),
    number("GPUS", 6),
];
pub(super) const LINKS: &[PaneColumn] = &[
    rest("NODE", 1),
    words("LINK", 14),
    number("RATE", 12),
    number("OF", 6),
    number("MEASURED", 12),
    number("CARRIED", 10),
    number("BATCHES", 7),
];
pub(super) const EVENTS: &[PaneColumn] =
    &[words("TIME", 20), words("REASON", 18), words("OBJECT", 26), rest("MESSAGE", 1)];
