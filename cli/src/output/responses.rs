//! The output of an inference's response: its values, a classifier's best classes, and the latency
//! breakdown.

use std::time::Duration;

use millrace_client::{InferResponse, LatencyBreakdown, Tensor};
use millrace_types::DataType;
use serde::Serialize;
use serde_json::{Value, json};

use crate::output::text;

/// The number of values shown per row.
const VALUES_SHOWN: usize = 12;
/// The number of rows shown per tensor.
const ROWS_SHOWN: usize = 16;

/// A response as a document: the protocol's body, and the latency breakdown beside it.
#[derive(Serialize)]
pub(crate) struct InferResponseDocument<'a> {
    model_name: &'a str,
    model_version: &'a str,
    id: &'a str,
    outputs: Vec<Output<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<SplitMillis>,
}

#[derive(Serialize)]
struct Output<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: &'a [i64],
    data: Vec<Value>,
}

#[derive(Serialize)]
struct SplitMillis {
    #[serde(skip_serializing_if = "Option::is_none")]
    cold_ms: Option<f64>,
    queue_ms: f64,
    swap_ms: f64,
    run_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ms: Option<f64>,
    other_ms: f64,
    total_ms: f64,
}

impl<'a> InferResponseDocument<'a> {
    pub(crate) fn of(answer: &'a InferResponse) -> Self {
        let output = |tensor: &'a Tensor| Output {
            name: tensor.name(),
            datatype: tensor.datatype().as_str(),
            shape: tensor.shape(),
            data: elements(tensor),
        };
        Self {
            model_name: &answer.model,
            model_version: &answer.version,
            id: &answer.request_id,
            outputs: answer.outputs.iter().map(output).collect(),
            split: answer.split.map(SplitMillis::from),
        }
    }
}

impl From<LatencyBreakdown> for SplitMillis {
    fn from(split: LatencyBreakdown) -> Self {
        // The server reports whole microseconds, so further digits would be noise.
        let ms = |span: Duration| span.as_micros() as f64 / 1e3;
        Self {
            cold_ms: (split.cold > Duration::ZERO).then(|| ms(split.cold)),
            queue_ms: ms(split.queue),
            swap_ms: ms(split.swap),
            run_ms: ms(split.run),
            token_ms: (split.token > Duration::ZERO).then(|| ms(split.token)),
            other_ms: ms(split.other()),
            total_ms: ms(split.total),
        }
    }
}

/// Returns a tensor's elements as flat JSON values. Half-precision numbers are their bits.
pub(crate) fn elements(tensor: &Tensor) -> Vec<Value> {
    fn each<const N: usize>(tensor: &Tensor, read: impl Fn([u8; N]) -> Value) -> Vec<Value> {
        tensor.data().as_chunks().0.iter().map(|chunk| read(*chunk)).collect()
    }
    match tensor.datatype() {
        DataType::Bool => each(tensor, |[byte]: [u8; 1]| json!(byte != 0)),
        DataType::Uint8 => each(tensor, |bytes| json!(u8::from_le_bytes(bytes))),
        DataType::Uint16 | DataType::Fp16 | DataType::Bf16 => {
            each(tensor, |bytes| json!(u16::from_le_bytes(bytes)))
        }
        DataType::Uint32 => each(tensor, |bytes| json!(u32::from_le_bytes(bytes))),
        DataType::Uint64 => each(tensor, |bytes| json!(u64::from_le_bytes(bytes))),
        DataType::Int8 => each(tensor, |bytes| json!(i8::from_le_bytes(bytes))),
        DataType::Int16 => each(tensor, |bytes| json!(i16::from_le_bytes(bytes))),
        DataType::Int32 => each(tensor, |bytes| json!(i32::from_le_bytes(bytes))),
        DataType::Int64 => each(tensor, |bytes| json!(i64::from_le_bytes(bytes))),
        DataType::Fp32 => each(tensor, |bytes| shortest(f32::from_le_bytes(bytes))),
        DataType::Fp64 => each(tensor, |bytes| json!(f64::from_le_bytes(bytes))),
        DataType::Bytes => {
            let strings = tensor.to_byte_strings().unwrap_or_default();
            strings.iter().map(|string| json!(String::from_utf8_lossy(string))).collect()
        }
    }
}

/// Returns a 32-bit float with its shortest digits, not those of its conversion to 64 bits.
fn shortest(value: f32) -> Value {
    json!(value.to_string().parse::<f64>().unwrap_or(f64::NAN))
}

/// Returns a tensor's values for people: a heading, then a line for each row of the last dimension.
pub(crate) fn values(tensor: &Tensor) -> Vec<String> {
    let heading = format!("{}  {} {}", tensor.name(), tensor.datatype(), text::shape(tensor.shape()));
    let elements = elements(tensor);
    let width = tensor.shape().last().and_then(|&dim| usize::try_from(dim).ok()).unwrap_or(1).max(1);
    let rows = elements.chunks(width);
    let hidden = rows.len().saturating_sub(ROWS_SHOWN);
    let mut lines = vec![heading];
    lines.extend(rows.take(ROWS_SHOWN).map(row));
    if hidden > 0 {
        lines.push(format!("  … and {hidden} more rows: -o json prints all"));
    }
    lines
}

fn row(values: &[Value]) -> String {
    let mut cells: Vec<String> = values.iter().take(VALUES_SHOWN).map(cell).collect();
    if values.len() > VALUES_SHOWN {
        cells.push(format!("… and {} more", values.len() - VALUES_SHOWN));
    }
    format!("  {}", cells.join("  "))
}

fn cell(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => {
            number.as_f64().map_or_else(|| number.to_string(), |number| format!("{number:.4}"))
        }
        other => other.to_string(),
    }
}

/// Returns a line for each picture with its best classes, or `None` if the output is not one row of
/// scores per picture.
pub(crate) fn best_classes(
    output: &Tensor,
    pictures: &[String],
    top: usize,
    labels: &[String],
) -> Option<Vec<String>> {
    let scores = output.to_f32().ok()?;
    // A workflow returns a row per object that it found in the picture.
    if let [rows, _, ..] = output.shape()
        && usize::try_from(*rows) != Ok(pictures.len())
    {
        return None;
    }
    if pictures.is_empty() || scores.is_empty() || !scores.len().is_multiple_of(pictures.len()) {
        return None;
    }
    let classes = scores.len() / pictures.len();
    let line = |(picture, scores): (&String, &[f32])| {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let probabilities = are_probabilities(scores);
        let show = |&class: &usize| {
            let name = labels.get(class).cloned().unwrap_or_else(|| class.to_string());
            match probabilities {
                true => format!("{name} ({:.1}%)", scores[class] * 100.0),
                false => format!("{name} ({:.4})", scores[class]),
            }
        };
        let best: Vec<_> = order.iter().take(top.max(1)).map(show).collect();
        format!("{picture}: {}", best.join(", "))
    };
    Some(pictures.iter().zip(scores.chunks(classes)).map(line).collect())
}

fn are_probabilities(scores: &[f32]) -> bool {
    let sum: f32 = scores.iter().sum();
    (sum - 1.0).abs() < 1e-3 && scores.iter().all(|score| (0.0..=1.0).contains(score))
}

/// Returns the request's id and latency breakdown.
pub(crate) fn footer(answer: &InferResponse) -> String {
    let version = if answer.version.is_empty() { String::new() } else { format!("@{}", answer.version) };
    let request = format!("{}{version}  request {}", answer.model, answer.request_id);
    match &answer.split {
        None => request,
        Some(split) => format!("{request}\n{}", split_line(split)),
    }
}

/// Returns a latency breakdown on a single line.
pub(crate) fn split_line(split: &LatencyBreakdown) -> String {
    let cold = match split.cold {
        Duration::ZERO => String::new(),
        cold => format!("cold start {} + ", text::latency(cold)),
    };
    let token = match split.token {
        Duration::ZERO => String::new(),
        token => format!("wait for SMs {} + ", text::latency(token)),
    };
    format!(
        "total {} = {cold}queue {} + swap {} + run {} + {token}other {}",
        text::latency(split.total),
        text::latency(split.queue),
        text::latency(split.swap),
        text::latency(split.run),
        text::latency(split.other())
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn scores(shape: &[i64], values: &[f32]) -> Tensor {
        Tensor::from_f32("y", shape.to_vec(), values).unwrap()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn best_classes_are_listed_first() {
        let output = scores(&[2, 3], &[0.1, 0.7, 0.2, 0.5, 0.25, 0.25]);
        let lines = best_classes(&output, &names(&["a.png", "b.png"]), 2, &[]).unwrap();
        assert_eq!(lines, ["a.png: 1 (70.0%), 2 (20.0%)", "b.png: 0 (50.0%), 1 (25.0%)"]);
        let lines = best_classes(&output, &names(&["a.png", "b.png"]), 1, &names(&["cat", "dog"])).unwrap();
        assert_eq!(lines, ["a.png: dog (70.0%)", "b.png: cat (50.0%)"]);
    }

    #[test]
    fn scores_that_are_not_probabilities_are_shown_unchanged() {
        let lines = best_classes(&scores(&[1, 2], &[-3.5, 2.0]), &names(&["a.png"]), 1, &[]).unwrap();
        assert_eq!(lines, ["a.png: 1 (2.0000)"]);
        assert_eq!(best_classes(&scores(&[3], &[0.0; 3]), &names(&["a", "b"]), 1, &[]), None);
        assert_eq!(best_classes(&scores(&[3], &[0.0; 3]), &[], 1, &[]), None);
        let found_in_one = scores(&[4, 2], &[0.0; 8]);
        assert_eq!(best_classes(&found_in_one, &names(&["a"]), 1, &[]), None);
    }

    #[test]
    fn long_rows_and_many_rows_are_truncated() {
        let lines = values(&scores(&[1, 14], &[0.5; 14]));
        assert_eq!(lines[0], "y  FP32 [1, 14]");
        assert!(lines[1].ends_with("0.5000  … and 2 more"), "{}", lines[1]);
        let lines = values(&scores(&[20, 1], &[1.0; 20]));
        assert_eq!(lines.last().unwrap(), "  … and 4 more rows: -o json prints all");
        assert_eq!(values(&scores(&[], &[2.0])), ["y  FP32 []", "  2.0000"]);
    }

    #[test]
    fn floats_are_written_with_their_shortest_digits() {
        let tensor = scores(&[4], &[0.1, 1e-7, f32::NAN, 3.0]);
        assert_eq!(serde_json::to_string(&elements(&tensor)).unwrap(), "[0.1,1e-7,null,3.0]");
    }

    #[test]
    fn a_response_document_is_the_protocols_body_with_the_split() {
        let split = LatencyBreakdown {
            cold: Duration::ZERO,
            queue: Duration::from_micros(100),
            swap: Duration::ZERO,
            run: Duration::from_micros(1500),
            token: Duration::ZERO,
            total: Duration::from_millis(2),
        };
        let answer = InferResponse {
            model: "m".into(),
            version: "1".into(),
            request_id: "r".into(),
            outputs: vec![Tensor::new("y", DataType::Int64, vec![2], Bytes::from(vec![1; 16])).unwrap()],
            split: Some(split),
        };
        let expected = json!({
            "model_name": "m", "model_version": "1", "id": "r",
            "outputs": [{"name": "y", "datatype": "INT64", "shape": [2],
                "data": [0x0101_0101_0101_0101_i64, 0x0101_0101_0101_0101_i64]}],
            "split": {"queue_ms": 0.1, "swap_ms": 0.0, "run_ms": 1.5, "other_ms": 0.4, "total_ms": 2.0},
        });
        assert_eq!(serde_json::to_value(InferResponseDocument::of(&answer)).unwrap(), expected);
        assert_eq!(
            footer(&answer),
            "m@1  request r\ntotal 2.00 ms = queue 100 µs + swap 0 + run 1.50 ms + other 400 µs"
        );
        let shared = LatencyBreakdown { token: Duration::from_micros(300), ..split };
        assert_eq!(
            split_line(&shared),
            "total 2.00 ms = queue 100 µs + swap 0 + run 1.50 ms + wait for SMs 300 µs + other 100 µs"
        );
    }
}
