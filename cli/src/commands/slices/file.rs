//! The file of a plan: GPUs, and orders in the form of FaSTPods (F01).

use std::io::Read as _;
use std::path::Path;

use millrace_slices::plan::{PlannedGpus, PodOrder, SLICES_MAX};
use millrace_types::{Bytes, FunctionName, Permille, Terms};
use serde::Deserialize;
use serde_saphyr::Spanned;

use crate::failure::CommandFailure;

/// Greatest size of a file.
const FILE_MAX: Bytes = Bytes::mib(1);

/// A checked file.
#[derive(Debug, PartialEq)]
pub(super) struct PlanFile {
    pub(super) gpus: PlannedGpus,
    pub(super) orders: Vec<PodOrder>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    gpus: GpusText,
    orders: Vec<Spanned<OrderText>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpusText {
    count: u32,
    memory: Spanned<String>,
}

/// An order as the file declares it. Shares are texts, because a percent sign may follow a number.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct OrderText {
    name: String,
    sm: Spanned<String>,
    quota_request: Spanned<String>,
    quota_limit: Option<Spanned<String>>,
    memory: Spanned<String>,
    bandwidth: Option<Spanned<String>>,
    replicas: Option<Spanned<u32>>,
}

/// Reads and checks a file, or standard input for `-`.
pub(super) fn read(path: &Path) -> Result<PlanFile, CommandFailure> {
    let about = |failure: CommandFailure| failure.about(path.display());
    let text = text(path).map_err(|problem| about(CommandFailure::usage(problem)))?;
    parse(&text).map_err(|problem| {
        about(CommandFailure::usage(problem).hint("millrace slices plan --help shows a file"))
    })
}

fn text(path: &Path) -> Result<String, String> {
    let input: Box<dyn std::io::Read> = if path == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(path).map_err(|error| format!("cannot read the file: {error}"))?)
    };
    let mut text = String::new();
    let read = input.take(FILE_MAX.get() + 1).read_to_string(&mut text);
    read.map_err(|error| format!("cannot read the file: {error}"))?;
    if text.len() as u64 > FILE_MAX.get() {
        return Err(format!("the file is larger than {FILE_MAX}: plan a part of the orders"));
    }
    Ok(text)
}

fn parse(text: &str) -> Result<PlanFile, String> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_total_scalar_bytes: 2 * FILE_MAX.get() as usize },
        with_snippet: false,
    };
    let file: FileText =
        serde_saphyr::from_str_with_options(text, options).map_err(|error| error.to_string())?;
    if file.orders.is_empty() || file.orders.len() > SLICES_MAX as usize {
        return Err(format!("the file has {} orders: write 1 to {SLICES_MAX}", file.orders.len()));
    }
    let memory =
        at("gpus.memory", &file.gpus.memory, |text| text.parse().map_err(|error| format!("{error}")))?;
    let gpus = PlannedGpus { count: file.gpus.count, memory };
    let orders = file.orders.iter().map(order).collect::<Result<_, _>>()?;
    Ok(PlanFile { gpus, orders })
}

fn order(text: &Spanned<OrderText>) -> Result<PodOrder, String> {
    let line = text.referenced.line();
    let order = &text.value;
    let name = FunctionName::new(&order.name).map_err(|error| format!("line {line}: name: {error}"))?;
    let wrong = |problem: String| format!("order {name}: {problem}");
    let sm = at("sm", &order.sm, |text| Permille::parse_sm(text).map_err(|error| error.to_string()));
    let quota = |field, value: &Spanned<String>| {
        at(field, value, |text| Permille::parse_quota(text).map_err(|error| error.to_string()))
    };
    let sm = sm.map_err(wrong)?;
    let request = quota("quotaRequest", &order.quota_request).map_err(wrong)?;
    let limit = order.quota_limit.as_ref().map_or(Ok(Permille::ALL), |limit| quota("quotaLimit", limit));
    let limit = limit.map_err(wrong)?;
    let terms =
        Terms::new(sm, sm, request, limit).map_err(|error| format!("line {line}: order {name}: {error}"))?;
    let memory = at("memory", &order.memory, |text| text.parse::<Bytes>().map_err(|error| error.to_string()));
    let memory = memory.map_err(wrong)?;
    let bandwidth = order.bandwidth.as_ref().map_or(Ok(Permille::ZERO), |share| quota("bandwidth", share));
    let bandwidth = bandwidth.map_err(wrong)?;
    let replicas = match &order.replicas {
        Some(replicas) if replicas.value == 0 => {
            let line = replicas.referenced.line();
            return Err(wrong(format!("line {line}: replicas is 0: write a number from 1 on")));
        }
        replicas => replicas.as_ref().map_or(1, |replicas| replicas.value),
    };
    Ok(PodOrder { name, terms, memory, bandwidth, replicas })
}

/// Parses the value of a field. A problem names the line and the field.
fn at<T>(
    field: &str,
    value: &Spanned<String>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, String> {
    parse(&value.value).map_err(|problem| format!("line {}: {field}: {problem}", value.referenced.line()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPUS: &str = "gpus: {count: 2, memory: 16GiB}\n";

    fn file(orders: &str) -> Result<PlanFile, String> {
        parse(&format!("{GPUS}orders:\n{orders}"))
    }

    #[test]
    fn an_order_is_parsed_with_its_defaults() {
        let parsed = file("- {name: bert, sm: 50, quotaRequest: 0.6, memory: 2GiB}\n").unwrap();
        let share = |thousandths| Permille::new(thousandths).unwrap();
        let order = PodOrder {
            name: FunctionName::new("bert").unwrap(),
            terms: Terms::new(share(500), share(500), share(600), Permille::ALL).unwrap(),
            memory: Bytes::gib(2),
            bandwidth: Permille::ZERO,
            replicas: 1,
        };
        let gpus = PlannedGpus { count: 2, memory: Bytes::gib(16) };
        assert_eq!(parsed, PlanFile { gpus, orders: vec![order] });
    }

    #[test]
    fn the_example_is_a_valid_file() {
        let example = parse(include_str!("../../../../examples/slices/pods.yaml")).unwrap();
        assert_eq!(example.orders.iter().map(|order| order.replicas).sum::<u32>(), 9);
    }

    #[test]
    fn malformed_files_are_refused_with_line_and_field() {
        let good = "- {name: a, sm: 12%, quotaRequest: 0.3, memory: 1GiB}\n";
        for (orders, says) in [
            (good.replace("12%", "120%"), "order a: line 3: sm: \"120%\" is not a share of the SMs"),
            (good.replace("0.3", "30"), "line 3: quotaRequest: \"30\" is not a quota"),
            (good.replace("1GiB", "many"), "line 3: memory: \"many\" is not a size"),
            (
                good.replace("1GiB", "1GiB, quotaLimit: 0.1"),
                "line 3: order a: the quota request 30% is above",
            ),
            (good.replace("1GiB", "1GiB, replicas: 0"), "replicas is 0: write a number from 1 on"),
            (good.replace("sm:", "sms:"), "sms"),
            (good.replace("name: a", "name: A"), "lower-case"),
            ("  []".to_owned(), "0 orders: write 1 to 1000"),
        ] {
            let message = file(&orders).unwrap_err();
            assert!(message.contains(says), "{says:?} is not in {message:?}");
        }
    }
}
