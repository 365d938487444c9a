//! Places a model's weights into a single region, in the order in which the nodes first read them
//! (T06). So groups can be copied front to back while the first launches run.

use std::collections::HashMap;

use bytes::Bytes;

use crate::onnx::{EXTERNAL, GraphProto, StringStringEntryProto, TensorProto, element};
use crate::tensors::{self, WeightSource};

/// Alignment of each weight in bytes: a cache line, which also suits vector loads.
pub const ALIGNMENT: u64 = 64;
/// Size in bytes below which a constant stays in the graph, because it would not fill a cache line.
pub const MIN_PLACED_BYTES: u64 = 64;
/// File name by which the graph's weights refer to the region.
pub const WEIGHTS_FILE: &str = "weights.data";

/// The position of a weight in the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightPlacement {
    /// Name of the weight in the model. Weights of sibling subgraphs may have the same name.
    pub name: String,
    /// Offset in the region in bytes, a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Source of the weight's bytes.
    pub source: WeightSource,
}

/// The positions of a model's weights.
pub(crate) struct WeightLayout {
    pub(crate) placements: Vec<WeightPlacement>,
    /// For each node: indices of the placements that the node or its subgraphs read.
    pub(crate) by_node: Vec<Vec<usize>>,
    /// Indices of the placements that are themselves outputs of the model.
    pub(crate) outputs: Vec<usize>,
    /// Number of elements of all constants with a floating-point or 8-bit type, placed or not.
    pub(crate) parameters: u64,
    /// Size of the region in bytes, a multiple of [`ALIGNMENT`].
    pub(crate) bytes: u64,
}

/// Moves the weights out of an arranged, pruned graph. `file` is the buffer from which the graph was decoded.
///
/// Types that the runtime converts on loading (INT64, BOOL, DOUBLE) stay in the graph, because the
/// runtime would not read their copy in the region.
pub(crate) fn place(graph: &mut GraphProto, reads: &[Vec<String>], file: &Bytes) -> WeightLayout {
    let mut weights: HashMap<String, WeightState<'_>> = HashMap::with_capacity(graph.initializer.len());
    for tensor in &mut graph.initializer {
        weights.insert(tensor.name().to_owned(), WeightState::Waiting(tensor));
    }
    let mut region = Region { file, placements: Vec::new(), end: 0, parameters: 0 };
    let mut by_node = Vec::with_capacity(graph.node.len());
    for (node, read) in graph.node.iter_mut().zip(reads) {
        let mut used: Vec<usize> =
            read.iter().filter_map(|name| weights.get_mut(name)?.settle(&mut region)).collect();
        for subgraph in node.attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()) {
            region.take_subgraph(subgraph, &mut used);
        }
        by_node.push(used);
    }
    let outputs =
        graph.output.iter().filter_map(|output| weights.get_mut(output.name())?.settle(&mut region));
    let outputs = outputs.collect();
    let Region { placements, end, parameters, .. } = region;
    WeightLayout { placements, by_node, outputs, parameters, bytes: end.next_multiple_of(ALIGNMENT) }
}

/// The state of a weight: not yet read by any node, or settled in the region (with its index) or in
/// the graph.
enum WeightState<'a> {
    Waiting(&'a mut TensorProto),
    Settled(Option<usize>),
}

impl WeightState<'_> {
    fn settle(&mut self, region: &mut Region<'_>) -> Option<usize> {
        if let Self::Waiting(tensor) = self {
            *self = Self::Settled(region.take(tensor));
        }
        match self {
            Self::Settled(place) => *place,
            Self::Waiting(_) => None,
        }
    }
}

struct Region<'a> {
    file: &'a Bytes,
    placements: Vec<WeightPlacement>,
    end: u64,
    parameters: u64,
}

impl Region<'_> {
    /// Moves a weight's bytes into the region if its type and size allow that, and leaves a reference
    /// in the graph. Returns the index of the placement.
    fn take(&mut self, tensor: &mut TensorProto) -> Option<usize> {
        let kind = tensor.data_type.unwrap_or_default();
        if matches!(kind, element::FLOAT | element::INT8 | element::UINT8 | element::DOUBLE) {
            self.parameters += tensors::elements(tensor);
        }
        let bytes = tensors::byte_len(tensor);
        if bytes < MIN_PLACED_BYTES || !matches!(kind, element::FLOAT | element::INT8 | element::UINT8) {
            return None;
        }
        let offset = self.end.next_multiple_of(ALIGNMENT);
        self.end = offset + bytes;
        let source = tensors::take_bytes(tensor, self.file);
        tensor.data_location = Some(EXTERNAL);
        tensor.external_data = [
            ("location", WEIGHTS_FILE.to_owned()),
            ("offset", offset.to_string()),
            ("length", bytes.to_string()),
        ]
        .map(|(key, value)| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) })
        .to_vec();
        self.placements.push(WeightPlacement { name: tensor.name().to_owned(), offset, bytes, source });
        Some(self.placements.len() - 1)
    }

    fn take_subgraph(&mut self, graph: &mut GraphProto, used: &mut Vec<usize>) {
        for tensor in &mut graph.initializer {
            used.extend(self.take(tensor));
        }
        for node in &mut graph.node {
            for subgraph in node.attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()) {
                self.take_subgraph(subgraph, used);
            }
        }
    }
}
