//! Operations for people and programs.

use millrace_client::messages as wire;
use serde::Serialize;

use crate::output::table::{TextTable, col, wide};
use crate::output::text::moment;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OperationDocument {
    id: String,
    kind: String,
    object: String,
    state: &'static str,
    done: u64,
    total: u64,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    started_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_at: Option<String>,
    started_by: String,
    cancellable: bool,
}

impl From<wire::Operation> for OperationDocument {
    fn from(operation: wire::Operation) -> Self {
        Self {
            state: word(operation.state()),
            id: operation.id,
            kind: operation.kind,
            object: operation.object,
            done: operation.done,
            total: operation.total,
            message: operation.message,
            started_at: operation.started_at.and_then(moment),
            ended_at: operation.ended_at.and_then(moment),
            started_by: operation.started_by,
            cancellable: operation.cancellable,
        }
    }
}

/// Returns the word for an operation's state.
pub(crate) fn word(state: wire::OperationState) -> &'static str {
    match state {
        wire::OperationState::Unspecified => "Unknown",
        wire::OperationState::Running => "Running",
        wire::OperationState::Succeeded => "Succeeded",
        wire::OperationState::Failed => "Failed",
        wire::OperationState::Cancelled => "Cancelled",
    }
}

/// Returns the progress of an operation, or an empty text if the progress cannot be counted.
pub(crate) fn progress(operation: &wire::Operation) -> String {
    if operation.total == 0 { String::new() } else { format!("{}/{}", operation.done, operation.total) }
}

pub(crate) fn table(operations: &[wire::Operation]) -> TextTable {
    let mut table = TextTable::new([
        col("ID"),
        col("KIND"),
        col("OBJECT"),
        col("STATE"),
        col("DONE"),
        col("STARTED"),
        wide("ENDED"),
        wide("BY"),
        col("MESSAGE"),
    ]);
    for it in operations {
        table.row([
            it.id.clone(),
            it.kind.clone(),
            it.object.clone(),
            word(it.state()).to_owned(),
            progress(it),
            it.started_at.and_then(moment).unwrap_or_default(),
            it.ended_at.and_then(moment).unwrap_or_default(),
            it.started_by.clone(),
            it.message.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ListFormat;

    #[test]
    fn an_operation_is_printed_with_its_progress() {
        let operation = |id: &str, state: wire::OperationState, total, message: &str| wire::Operation {
            id: id.into(),
            kind: "DrainNode".into(),
            object: "node/a".into(),
            state: state.into(),
            done: 1,
            total,
            message: message.into(),
            ..Default::default()
        };
        let operations = [
            operation("9", wire::OperationState::Running, 3, "2 functions are still to move"),
            operation("4", wire::OperationState::Cancelled, 0, ""),
        ];
        let expected = "\
ID   KIND        OBJECT   STATE       DONE   STARTED   MESSAGE
9    DrainNode   node/a   Running     1/3    -         2 functions are still to move
4    DrainNode   node/a   Cancelled   -      -         -
";
        assert_eq!(table(&operations).render(ListFormat::Table), expected);
    }
}
