//! Places a model's weights in one region, in the order in which its nodes first read them (T06), so
//! that groups can be copied front to back while the first launches run.

use std::collections::HashMap;

use bytes::Bytes;

use crate::onnx::{EXTERNAL, GraphProto, StringStringEntryProto, TensorProto, element};
use crate::tensors::{self, Source};

/// Each weight starts at a multiple of this many bytes: a cache line, and what vector loads want.
pub const ALIGNMENT: u64 = 64;
/// A constant smaller than this stays in the graph: it would not fill a cache line.
pub const MIN_PLACED_BYTES: u64 = 64;
/// The name under which the graph's weights refer to the region.
pub const WEIGHTS_FILE: &str = "weights.data";

/// One weight in the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The weight's name in the model. Weights of sibling subgraphs may share one.
    pub name: String,
    /// Where it starts in the region, a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Where its bytes come from.
    pub source: Source,
}

/// Where the weights went.
pub(crate) struct Layout {
    pub(crate) placements: Vec<Placement>,
    /// For each node, the placements it or its subgraphs read.
    pub(crate) by_node: Vec<Vec<usize>>,
    /// Placements that are outputs of the model themselves.
    pub(crate) outputs: Vec<usize>,
    /// Elements of all constants of a weight's type, placed or not.
    pub(crate) parameters: u64,
    /// The region's size, a multiple of [`ALIGNMENT`].
    pub(crate) bytes: u64,
}

/// Moves the weights of an arranged, pruned graph out of it. `file` is what it was decoded from.
///
/// Types that the runtime converts on loading (INT64, BOOL, DOUBLE) stay in the graph: their copy in
/// the region would not be what it reads.
pub(crate) fn place(graph: &mut GraphProto, reads: &[Vec<String>], file: &Bytes) -> Layout {
    let mut weights: HashMap<String, Weight<'_>> = HashMap::with_capacity(graph.initializer.len());
    for tensor in &mut graph.initializer {
        weights.insert(tensor.name().to_owned(), Weight::Waiting(tensor));
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
    Layout { placements, by_node, outputs, parameters, bytes: end.next_multiple_of(ALIGNMENT) }
}

/// A weight on its way: met by no node yet, or settled in the region or in the graph.
enum Weight<'a> {
    Waiting(&'a mut TensorProto),
    Settled(Option<usize>),
}

impl Weight<'_> {
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
    placements: Vec<Placement>,
    end: u64,
    parameters: u64,
}

impl Region<'_> {
    /// Takes a weight's bytes if they belong into the region, and leaves a reference to it.
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
        self.placements.push(Placement { name: tensor.name().to_owned(), offset, bytes, source });
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
