//! The plan as a document for programs.

use millrace_slices::plan::{Packing, SlicePlan};
use millrace_slices::units::Grid;
use millrace_types::SliceId;
use serde::Serialize;

use super::file::PlanFile;

/// A plan. Shares are in thousandths.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PlanDocument {
    gpus: GpusDocument,
    slices: Vec<SliceDocument>,
    dry_run: PackingDocument,
    maximal_rectangles: PackingDocument,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct GpusDocument {
    count: u32,
    memory_bytes: u64,
    /// SM units of a GPU in the dry runs.
    units: u8,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SliceDocument {
    name: String,
    sm: u16,
    units: u8,
    quota_request: u16,
    quota_limit: u16,
    memory_bytes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PackingDocument {
    gpus_used: usize,
    gpus: Vec<GpuDocument>,
    refused: Vec<RefusalDocument>,
}

#[derive(Debug, Serialize)]
struct GpuDocument {
    slices: Vec<String>,
    rectangles: Vec<RectangleDocument>,
}

/// A part of the window's time and of the SMs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RectangleDocument {
    slice: String,
    time: u16,
    time_length: u16,
    sm: u16,
    sm_width: u16,
}

#[derive(Debug, Serialize)]
struct RefusalDocument {
    slice: String,
    reason: String,
}

/// Returns the name of a slice: the order's name and the number of the replica.
pub(super) fn name(file: &PlanFile, plan: &SlicePlan, slice: SliceId) -> String {
    let slice = plan.slices[slice.0 as usize];
    format!("{}/{}", file.orders[slice.order].name, slice.replica)
}

impl PlanDocument {
    pub(super) fn new(file: &PlanFile, plan: &SlicePlan, grid: Grid) -> Self {
        let slice = |place: usize| {
            let order = &file.orders[plan.slices[place].order];
            SliceDocument {
                name: name(file, plan, SliceId(place as u64)),
                sm: order.terms.least().get(),
                units: grid.units(order.terms.least()),
                quota_request: order.terms.request().get(),
                quota_limit: order.terms.limit().get(),
                memory_bytes: order.memory.get(),
            }
        };
        let gpus = GpusDocument {
            count: file.gpus.count,
            memory_bytes: file.gpus.memory.get(),
            units: grid.total(),
        };
        Self {
            gpus,
            slices: (0..plan.slices.len()).map(slice).collect(),
            dry_run: PackingDocument::new(file, plan, &plan.ours),
            maximal_rectangles: PackingDocument::new(file, plan, &plan.paper),
        }
    }
}

impl PackingDocument {
    fn new(file: &PlanFile, plan: &SlicePlan, packing: &Packing) -> Self {
        let gpus = packing.gpus.iter().map(|gpu| GpuDocument {
            slices: gpu.slices.iter().map(|slice| name(file, plan, *slice)).collect(),
            rectangles: gpu
                .picture
                .iter()
                .map(|(slice, it)| RectangleDocument {
                    slice: name(file, plan, *slice),
                    time: it.x,
                    time_length: it.width,
                    sm: it.y,
                    sm_width: it.height,
                })
                .collect(),
        });
        let refused = packing.refused.iter().map(|(slice, refusal)| RefusalDocument {
            slice: name(file, plan, *slice),
            reason: refusal.to_string(),
        });
        Self { gpus_used: packing.gpus.len(), gpus: gpus.collect(), refused: refused.collect() }
    }
}
