//! The formats of a listing, and the flag that selects one.

use clap::ValueEnum;

/// The format of a listing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListFormat {
    /// Aligned columns.
    #[default]
    Table,
    /// Aligned columns, with further columns.
    Wide,
    Json,
    Yaml,
}

/// The `-o` flag of the verbs that print listings.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub(crate) struct ListOutput {
    /// The output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t)]
    pub(crate) output: ListFormat,
}
