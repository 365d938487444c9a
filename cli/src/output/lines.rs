//! Output that is printed line by line as it arrives. Aligned columns would have to wait for all
//! lines.

use clap::ValueEnum;
use serde::Serialize;

use crate::failure::CommandFailure;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Text,
    Json,
}

/// The `-o` flag of the verbs that print lines.
#[derive(Debug, clap::Args)]
pub(crate) struct LineOutput {
    /// The output format: text, or a line of JSON for each item.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t)]
    output: Format,
}

impl LineOutput {
    /// Returns an item with its line end: as formatted by `text`, or as its document.
    pub(crate) fn line(
        &self,
        text: impl FnOnce() -> String,
        document: &impl Serialize,
    ) -> Result<String, CommandFailure> {
        match self.output {
            Format::Text => Ok(text()),
            Format::Json => {
                let json = serde_json::to_string(document);
                let json =
                    json.map_err(|error| CommandFailure::failed(format!("cannot write the line: {error}")))?;
                Ok(json + "\n")
            }
        }
    }
}
