//! The table of `get functions`.

use std::time::SystemTime;

use millrace_client::messages as wire;

use crate::output::fields::{labels, objective, readiness, short_digest};
use crate::output::table::{TextTable, col, wide};
use crate::output::{documents, text};

pub(super) fn function_table(functions: &[wire::Function], now: SystemTime) -> TextTable {
    let mut table = TextTable::new([
        wide("TENANT"),
        col("NAME"),
        col("READY"),
        col("REVISION"),
        col("MODEL"),
        col("SLO"),
        wide("TIMEOUT"),
        wide("PARAMETERS"),
        wide("DIGEST"),
        wide("LABELS"),
        col("AGE"),
    ]);
    for function in functions {
        let spec = function.spec.clone().unwrap_or_default();
        let latest = function.revisions.iter().max_by_key(|revision| revision.number);
        let artifact = latest.and_then(|revision| revision.artifact.as_ref());
        let model = latest.and_then(|revision| revision.model.as_ref());
        table.row([
            spec.tenant.clone(),
            spec.name.clone(),
            readiness(&function.conditions).to_owned(),
            function.generation.to_string(),
            artifact.map(|artifact| text::size(artifact.bytes)).unwrap_or_default(),
            spec.slo.as_ref().map(objective).unwrap_or_default(),
            spec.timeout.and_then(documents::span).unwrap_or_default(),
            model.map(|model| text::count(model.parameters)).unwrap_or_default(),
            artifact.map(|artifact| short_digest(&artifact.digest)).unwrap_or_default(),
            labels(&spec.labels).join(","),
            text::age_of(function.created_at, now),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ListFormat;

    #[test]
    fn a_function_without_conditions_has_unknown_readiness() {
        let function = wire::Function {
            spec: Some(wire::FunctionSpec { name: "digits".into(), ..Default::default() }),
            generation: 1,
            ..Default::default()
        };
        let table = function_table(&[function], SystemTime::UNIX_EPOCH);
        let expected = "NAME     READY     REVISION   MODEL   SLO   AGE\ndigits   Unknown   1          -       -     -\n";
        assert_eq!(table.render(ListFormat::Table), expected);
    }
}
