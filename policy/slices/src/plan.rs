//! A list of orders, packed in our way and in the paper's way, with a picture of each GPU.
//!
//! Both packers place the slices one by one in the order of the list, as pods arrive.

use std::time::Duration;

use millrace_types::{Bytes, FunctionName, Permille, SliceId, SmShare, Terms};

use crate::dry_run::{self, Granted};
use crate::pack::{Misfit, Packer, Refusal, SliceDemand};
use crate::rectangles::{Rectangle, RectanglePacker, Restructure, SIDE};
use crate::tokens::Config;

/// Greatest number of slices in a plan: the replicas of all orders.
pub const SLICES_MAX: u32 = 1000;
/// Greatest number of GPUs in a plan.
pub const GPUS_MAX: u32 = 256;

/// An order for equal slices: a FaSTPod (F01).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOrder {
    pub name: FunctionName,
    pub terms: Terms,
    pub memory: Bytes,
    pub bandwidth: Permille,
    pub replicas: u32,
}

/// The GPUs of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedGpus {
    pub count: u32,
    pub memory: Bytes,
}

/// The fault of a list that is not planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("the plan has {0} GPUs: write a number from 1 to {GPUS_MAX}")]
    Gpus(u32),
    #[error("the orders have more than {SLICES_MAX} replicas together: plan a part of them")]
    TooManySlices,
    #[error("order {0} requests 0% of the time: a plan packs requests, so write a request above 0")]
    NoRequest(FunctionName),
}

/// A slice of a plan; its identifier is the position in [`SlicePlan::slices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedSlice {
    /// Position of the order.
    pub order: usize,
    /// Number of the replica, from 1.
    pub replica: u32,
}

/// A GPU of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuPlan {
    pub slices: Vec<SliceId>,
    /// When each slice computes on which SMs: tokens of a dry run, or the paper's rectangles.
    pub picture: Vec<(SliceId, Rectangle)>,
}

/// All slices, packed in one way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Packing {
    /// The GPUs in use.
    pub gpus: Vec<GpuPlan>,
    pub refused: Vec<(SliceId, Refusal)>,
}

/// A list of orders, packed in both ways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlicePlan {
    pub slices: Vec<PlannedSlice>,
    pub ours: Packing,
    pub paper: Packing,
}

/// Packs the replicas of all orders in the order of the list.
///
/// # Errors
///
/// Fails if a number is out of bounds, or if an order requests nothing.
pub fn plan(orders: &[PodOrder], gpus: PlannedGpus, config: Config) -> Result<SlicePlan, PlanError> {
    if !(1..=GPUS_MAX).contains(&gpus.count) {
        return Err(PlanError::Gpus(gpus.count));
    }
    let slices = slices(orders)?;
    let demand = |(place, slice): (usize, &PlannedSlice)| {
        let order = &orders[slice.order];
        let id = SliceId(place as u64);
        SliceDemand { id, terms: order.terms, memory: order.memory, bandwidth: order.bandwidth }
    };
    let demands: Vec<_> = slices.iter().enumerate().map(demand).collect();
    let ours = by_dry_run(&demands, gpus, config);
    let paper = by_rectangles(&demands, gpus);
    Ok(SlicePlan { slices, ours, paper })
}

fn slices(orders: &[PodOrder]) -> Result<Vec<PlannedSlice>, PlanError> {
    let sum = orders.iter().try_fold(0_u32, |sum, order| sum.checked_add(order.replicas));
    if sum.is_none_or(|sum| sum > SLICES_MAX) {
        return Err(PlanError::TooManySlices);
    }
    if let Some(order) = orders.iter().find(|order| order.terms.request() == Permille::ZERO) {
        return Err(PlanError::NoRequest(order.name.clone()));
    }
    let replicas = |(place, order): (usize, &PodOrder)| {
        (1..=order.replicas).map(move |replica| PlannedSlice { order: place, replica })
    };
    Ok(orders.iter().enumerate().flat_map(replicas).collect())
}

fn by_dry_run(demands: &[SliceDemand], gpus: PlannedGpus, config: Config) -> Packing {
    let mut packer = Packer::new(config, gpus.memory, gpus.count as usize);
    let mut packing = Packing::default();
    for demand in demands {
        if let Err(refusal) = packer.place(*demand) {
            packing.refused.push((demand.id, refusal));
        }
    }
    for slices in packer.gpus() {
        packing.gpus.push(GpuPlan {
            slices: slices.iter().map(|slice| slice.id).collect(),
            picture: picture(config, slices),
        });
    }
    packing
}

fn by_rectangles(demands: &[SliceDemand], gpus: PlannedGpus) -> Packing {
    let mut packer = RectanglePacker::new(gpus.count as usize, Restructure::Always);
    let mut packing = Packing::default();
    let mut free: Vec<u64> = vec![gpus.memory.get(); gpus.count as usize];
    for demand in demands {
        let memory = demand.memory.get();
        if memory > gpus.memory.get() {
            packing.refused.push((demand.id, Refusal::LargerThanGpu(Misfit::Memory)));
            continue;
        }
        match packer.place(demand.id, demand.terms, |gpu| free[gpu] >= memory) {
            Some((gpu, rectangle)) => {
                free[gpu] -= memory;
                packing.gpus.resize_with(packer.gpus().len(), GpuPlan::default);
                packing.gpus[gpu].slices.push(demand.id);
                packing.gpus[gpu].picture.push((demand.id, rectangle));
            }
            None => {
                let width = demand.terms.request();
                let height = demand.terms.least();
                packing.refused.push((demand.id, Refusal::NoRectangle { width, height }));
            }
        }
    }
    packing
}

/// Returns the tokens of a dry run as rectangles.
fn picture(config: Config, slices: &[SliceDemand]) -> Vec<(SliceId, Rectangle)> {
    let terms: Vec<Terms> = slices.iter().map(|slice| slice.terms).collect();
    let mut drawn: Vec<(SliceId, Rectangle)> = Vec::new();
    let mut open: Vec<Rectangle> = Vec::new();
    for token in dry_run::timeline(config, &terms) {
        let x = part_of(token.from, config);
        let right = part_of(token.to, config);
        if right <= x {
            continue;
        }
        open.retain(|other| other.x + other.width > x);
        let (y, height) = sms(&token, &open);
        let rectangle = Rectangle { x, y, width: right - x, height };
        open.push(rectangle);
        let id = slices[token.slice].id;
        let same = |it: &&mut (SliceId, Rectangle)| {
            it.0 == id && it.1.y == y && it.1.height == height && it.1.x + it.1.width == x
        };
        match drawn.iter_mut().rev().find(same) {
            Some((_, before)) => before.width += rectangle.width,
            None => drawn.push((id, rectangle)),
        }
    }
    drawn
}

/// Returns a time as a part of the period, in thousandths.
fn part_of(time: Duration, config: Config) -> u16 {
    let part = time.as_nanos() * u128::from(SIDE) / config.cap().period().as_nanos();
    u16::try_from(part).unwrap_or(SIDE).min(SIDE)
}

/// Returns the lowest and the number of the SMs of a token, in thousandths. A percentage of MPS has no certain
/// SMs; it is drawn on the lowest that are free.
fn sms(token: &Granted, open: &[Rectangle]) -> (u16, u16) {
    match token.on {
        SmShare::Block(block) => {
            let edge = |unit: u8| u16::from(unit) * (SIDE / 8) / 2;
            let low = edge(block.first());
            (low, edge(block.first() + block.width()) - low)
        }
        SmShare::Cap(percent) => {
            let height = u16::from(percent.get()) * (SIDE / 100);
            let mut y = 0;
            while let Some(other) =
                open.iter().find(|other| other.y < y + height && y < other.y + other.height)
            {
                y = other.y + other.height;
            }
            (y, height)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(name: &str, sm: u16, request: u16, replicas: u32) -> PodOrder {
        let share = |percent: u16| Permille::new(percent * 10).unwrap();
        let terms = Terms::new(share(sm), share(sm), share(request), Permille::ALL).unwrap();
        let name = FunctionName::new(name).unwrap();
        PodOrder { name, terms, memory: Bytes::gib(1), bandwidth: Permille::ZERO, replicas }
    }

    const GPUS: PlannedGpus = PlannedGpus { count: 4, memory: Bytes::gib(16) };

    /// The pods of FaST-GShare, section 5.4, in an order for which the paper's rectangles need two GPUs.
    fn pods() -> [PodOrder; 3] {
        [order("resnet", 12, 40, 4), order("rnnt", 24, 40, 2), order("bert", 50, 60, 2)]
    }

    #[test]
    fn the_papers_pods_take_a_single_gpu_in_our_way() {
        for config in [Config::SLICES, Config::PAPER] {
            let plan = plan(&pods(), GPUS, config).unwrap();
            assert_eq!(plan.slices.len(), 8);
            assert_eq!((plan.ours.gpus.len(), plan.ours.refused.len()), (1, 0));
            assert!(plan.paper.gpus.len() <= 2);
        }
    }

    #[test]
    fn the_picture_of_a_gpu_has_no_overlap_and_the_area_of_the_requests() {
        for config in [Config::SLICES, Config::PAPER] {
            let plan = plan(&pods(), GPUS, config).unwrap();
            for gpu in plan.ours.gpus.iter().chain(&plan.paper.gpus) {
                for (at, (_, one)) in gpu.picture.iter().enumerate() {
                    assert!(Rectangle::GPU.contains(*one));
                    assert!(gpu.picture[at + 1..].iter().all(|(_, other)| !one.meets(*other)), "{gpu:?}");
                }
            }
        }
    }

    #[test]
    fn memory_refuses_slices_in_both_ways() {
        let big = PodOrder { memory: Bytes::gib(9), ..order("big", 12, 10, 2) };
        let one = PlannedGpus { count: 1, ..GPUS };
        let plan = plan(&[big], one, Config::SLICES).unwrap();
        let refused = |packing: &Packing| packing.refused[0].1.to_string();
        assert_eq!(refused(&plan.ours), "no GPU has room: 1 lacks memory");
        assert!(refused(&plan.paper).contains("10% of the time by 12% of the SMs"));
    }

    #[test]
    fn lists_beyond_the_bounds_are_refused() {
        let refused = |orders: &[PodOrder], count| {
            plan(orders, PlannedGpus { count, ..GPUS }, Config::SLICES).unwrap_err().to_string()
        };
        assert!(refused(&[], 0).contains("from 1 to 256"));
        assert!(refused(&[], 257).contains("from 1 to 256"));
        assert!(
            refused(&[order("a", 12, 10, u32::MAX), order("b", 12, 10, 2)], 1).contains("more than 1000")
        );
        assert!(refused(&[order("a", 12, 0, 1)], 1).contains("above 0"));
    }
}
