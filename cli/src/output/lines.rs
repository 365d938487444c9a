//! What is printed as it comes, a line each: columns that wait for all of it are no use there.

use clap::ValueEnum;
use serde::Serialize;

use crate::failure::Failure;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Text,
    Json,
}

/// The `-o` flag of whatever shows lines.
#[derive(Debug, clap::Args)]
pub(crate) struct Lines {
    /// How to print: text, or a line of JSON for each.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t)]
    output: Format,
}

impl Lines {
    /// One of them with its end: as `text` writes it, or its document.
    pub(crate) fn line(
        &self,
        text: impl FnOnce() -> String,
        document: &impl Serialize,
    ) -> Result<String, Failure> {
        match self.output {
            Format::Text => Ok(text()),
            Format::Json => {
                let json = serde_json::to_string(document);
                let json =
                    json.map_err(|error| Failure::failed(format!("cannot write the line: {error}")))?;
                Ok(json + "\n")
            }
        }
    }
}
