//! Free lists against brute force, over random places and releases.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use millrace_slices::rectangles::{Rectangle, RectangleGpu, RectanglePacker, Restructure, SIDE};
use millrace_types::{Permille, SliceId, Terms};
use proptest::prelude::*;

/// Returns the edges of all rectangles and of the GPU on an axis.
fn edges(taken: &[Rectangle], axis: impl Fn(&Rectangle) -> (u16, u16)) -> Vec<u16> {
    let ends = taken.iter().map(axis).flat_map(|(at, size)| [at, at + size]);
    ends.chain([0, SIDE]).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the maximal free rectangles: all rectangles between edges are tried.
fn maximal(taken: &[Rectangle]) -> BTreeSet<Rectangle> {
    let xs = edges(taken, |it| (it.x, it.width));
    let ys = edges(taken, |it| (it.y, it.height));
    let mut free = Vec::new();
    for (at, &x) in xs.iter().enumerate() {
        for &right in &xs[at + 1..] {
            for (at, &y) in ys.iter().enumerate() {
                for &top in &ys[at + 1..] {
                    let it = Rectangle { x, y, width: right - x, height: top - y };
                    if taken.iter().all(|taken| !taken.meets(it)) {
                        free.push(it);
                    }
                }
            }
        }
    }
    let is_maximal = |it: &&Rectangle| !free.iter().any(|other| other != *it && other.contains(**it));
    free.iter().filter(is_maximal).copied().collect()
}

/// Returns the area of the union of rectangles.
fn covered(rectangles: &[Rectangle]) -> u32 {
    let xs = edges(rectangles, |it| (it.x, it.width));
    let ys = edges(rectangles, |it| (it.y, it.height));
    let mut area = 0;
    for x in xs.windows(2) {
        for y in ys.windows(2) {
            let cell = Rectangle { x: x[0], y: y[0], width: x[1] - x[0], height: y[1] - y[0] };
            if rectangles.iter().any(|it| it.contains(cell)) {
                area += cell.area();
            }
        }
    }
    area
}

fn taken(gpu: &RectangleGpu) -> Vec<Rectangle> {
    gpu.taken().values().copied().collect()
}

fn terms(request: u16, sm: u16) -> Terms {
    let share = |percent: u16| Permille::new(percent * 10).unwrap();
    Terms::new(share(sm), share(sm), share(request), Permille::ALL).unwrap()
}

/// A place of a slice by request and SMs in percent, or a release of one of the placed slices.
#[derive(Debug, Clone, Copy)]
enum Step {
    Place(u16, u16),
    Release(usize),
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let place = (1_u16..=60, 1_u16..=60).prop_map(|(request, sm)| Step::Place(request, sm));
    let release = any::<usize>().prop_map(Step::Release);
    prop::collection::vec(prop_oneof![3 => place, 2 => release], 1..length)
}

/// Carries out the steps, and checks each changed GPU.
fn carry_out(steps: &[Step], restructure: Restructure, check: impl Fn(&RectangleGpu)) {
    let mut packer = RectanglePacker::new(64, restructure);
    let mut placed = Vec::new();
    for (id, step) in steps.iter().enumerate() {
        match *step {
            Step::Place(request, sm) => {
                let id = SliceId(id as u64);
                let (gpu, _) = packer.place(id, terms(request, sm), |_| true).unwrap();
                placed.push((id, gpu));
                check(&packer.gpus()[gpu]);
            }
            Step::Release(_) if placed.is_empty() => {}
            Step::Release(at) => {
                let (id, gpu) = placed.swap_remove(at % placed.len());
                assert!(packer.remove(id));
                check(&packer.gpus()[gpu]);
            }
        }
    }
}

fn slices_are_disjoint(gpu: &RectangleGpu) {
    let taken = taken(gpu);
    for (at, one) in taken.iter().enumerate() {
        assert!(Rectangle::GPU.contains(*one));
        assert!(taken[at + 1..].iter().all(|other| !one.meets(*other)), "{taken:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn free_lists_are_exactly_the_maximal_free_rectangles(steps in steps(40)) {
        carry_out(&steps, Restructure::Always, |gpu| {
            slices_are_disjoint(gpu);
            let free: BTreeSet<Rectangle> = gpu.free().iter().copied().collect();
            assert_eq!(free, maximal(&taken(gpu)));
        });
    }

    #[test]
    fn kept_free_lists_lose_no_free_area(steps in steps(120)) {
        carry_out(&steps, Restructure::Keep, |gpu| {
            slices_are_disjoint(gpu);
            assert_eq!(covered(gpu.free()), Rectangle::GPU.area() - gpu.used_area());
            assert!(gpu.free().iter().all(|free| taken(gpu).iter().all(|it| !it.meets(*free))));
        });
    }
}

#[test]
fn a_kept_free_list_stays_short_and_whole_over_many_releases() {
    let mut packer = RectanglePacker::new(64, Restructure::Keep);
    let mut state = 7_u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut placed: Vec<SliceId> = Vec::new();
    for step in 0..100_000 {
        if placed.len() < 20 && random(2) == 0 {
            let terms = terms(1 + random(60) as u16, 1 + random(60) as u16);
            packer.place(SliceId(step), terms, |_| true).unwrap();
            placed.push(SliceId(step));
        } else if !placed.is_empty() {
            let slice = placed.swap_remove(random(placed.len() as u64) as usize);
            assert!(packer.remove(slice));
        }
        for gpu in packer.gpus().iter().filter(|_| step % 100 == 0) {
            assert!(gpu.free().len() <= 10 * gpu.taken().len() + 10, "{gpu:?}");
            assert_eq!(covered(gpu.free()), Rectangle::GPU.area() - gpu.used_area());
        }
    }
}

#[test]
fn the_papers_pods_fit_one_gpu_in_some_orders_only() {
    let place = |pods: &[Terms]| {
        let mut packer = RectanglePacker::new(8, Restructure::Always);
        for (id, pod) in pods.iter().enumerate() {
            packer.place(SliceId(id as u64), *pod, |_| true).unwrap();
        }
        packer.gpus().len()
    };
    let resnet = terms(40, 12);
    let rnnt = terms(40, 24);
    let bert = terms(60, 50);
    assert_eq!(place(&[bert, bert, rnnt, rnnt, resnet, resnet, resnet, resnet]), 1);
    assert_eq!(place(&[resnet, resnet, resnet, resnet, bert, rnnt, rnnt, bert]), 2);
}
