//! The helper kernels, with bodies in Rust. Each body gives the exact result of the kernel of the same name
//! in `device/src/cuda/kernels.ptx`, whose parameters these tables repeat.
#![allow(unsafe_code, reason = "reads and writes memory at addresses of the program")]

use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUresult::*;

use crate::calls::{CallOutcome, DriverCall};
use crate::stream::DeviceStream;
use crate::work::{Touch, await_flag, nap, write_flag};

#[derive(Debug)]
pub(crate) struct Kernel {
    name: &'static str,
    /// Sizes of the parameters in bytes.
    pub(crate) parameters: &'static [usize],
    /// Alignment of the arguments, in the order of the parameters; 1 for numbers.
    alignments: &'static [u64],
    body: Body,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Xor,
    Pattern,
    Check,
    Hash,
    Spin,
    Fma,
    Touch,
    Smid,
    Flag,
    Await,
}

static KERNELS: &[Kernel] = &[
    kernel("millrace_xor", &[8, 8, 4], &[4, 4, 1], Body::Xor),
    kernel("millrace_pattern", &[8, 8, 8], &[8, 8, 1], Body::Pattern),
    kernel("millrace_check", &[8, 8, 8, 8], &[8, 8, 1, 8], Body::Check),
    kernel("millrace_hash", &[8, 8, 8], &[16, 16, 8], Body::Hash),
    kernel("millrace_spin", &[8], &[1], Body::Spin),
    kernel("millrace_fma", &[8, 4], &[4, 1], Body::Fma),
    kernel("millrace_touch", &[8, 8, 4, 8], &[16, 1, 1, 8], Body::Touch),
    kernel("millrace_smid", &[8, 8], &[4, 1], Body::Smid),
    kernel("millrace_flag", &[8, 4], &[4, 1], Body::Flag),
    kernel("millrace_await", &[8, 4, 8], &[4, 1, 1], Body::Await),
];

const fn kernel(
    name: &'static str,
    parameters: &'static [usize],
    alignments: &'static [u64],
    body: Body,
) -> Kernel {
    Kernel { name, parameters, alignments, body }
}

impl Kernel {
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        KERNELS.iter().find(|kernel| kernel.name == name)
    }
}

/// A launch with its arguments.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) module: usize,
    pub(crate) kernel: &'static Kernel,
    /// As many as the kernel has parameters.
    pub(crate) arguments: Vec<u64>,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

/// The finaliser of splitmix64.
pub(crate) fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A range of words in memory that was checked.
#[derive(Debug, Clone, Copy)]
struct Words<T> {
    start: *mut T,
    count: u64,
}

impl<T: Copy> Words<T> {
    /// The range must be what [`Launch::touches`] names: `Touch::check` found it mapped, and no call unmaps
    /// memory that queued work uses.
    fn new(at: u64, count: u64) -> Self {
        Self { start: std::ptr::with_exposed_provenance_mut(at as usize), count }
    }

    fn read(self, index: u64) -> T {
        assert!(index < self.count, "the index is past the range");
        // SAFETY: within the range, which is mapped and aligned. Bytes of device memory are any values.
        unsafe { self.start.add(index as usize).read() }
    }

    fn write(self, index: u64, value: T) {
        assert!(index < self.count, "the index is past the range");
        // SAFETY: as above.
        unsafe { self.start.add(index as usize).write(value) };
    }
}

/// Returns the word at an address, for the additions of kernels that run at the same time.
fn counter<'a>(at: u64) -> &'a AtomicU64 {
    // SAFETY: `Touch::check` found the word mapped, and the alignment was checked.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at as usize)) }
}

impl Launch {
    /// Returns an argument, or 0 past the last.
    fn argument(&self, at: usize) -> u64 {
        self.arguments.get(at).copied().unwrap_or_default()
    }

    fn all_threads(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.threads)
    }

    /// Returns the memory that the launch uses.
    pub(crate) fn touches(&self) -> Vec<Touch> {
        let [first, second] = [self.argument(0), self.argument(1)];
        let blocks = u64::from(self.blocks);
        match self.kernel.body {
            Body::Xor => vec![Touch::write(first, second.min(self.all_threads() * 4))],
            Body::Pattern => vec![Touch::write(first, second)],
            Body::Check => vec![Touch::read(first, second), Touch::write(self.argument(3), 8)],
            Body::Hash if second == 0 => Vec::new(),
            Body::Hash => vec![
                Touch::read(first, second.saturating_mul(blocks)),
                Touch::write(self.argument(2), blocks * 8),
            ],
            Body::Spin => Vec::new(),
            Body::Fma => vec![Touch::write(first, self.all_threads() * 4)],
            Body::Touch if second == 0 || self.argument(2) == 0 => Vec::new(),
            // A last piece that is shorter is read in full.
            Body::Touch => vec![
                Touch::read(first, second.checked_next_multiple_of(16).unwrap_or(u64::MAX)),
                Touch::write(self.argument(3), 8),
            ],
            Body::Smid => vec![Touch::write(first, blocks * 4)],
            Body::Flag => vec![Touch::write(first, 4)],
            Body::Await => vec![Touch::read(first, 4)],
        }
    }

    /// Runs the kernel on the thread of its stream. The memory was checked.
    pub(crate) fn run(&self, stream: &DeviceStream, call: &DriverCall) -> CallOutcome {
        let aligned = |(argument, &alignment): (&u64, &u64)| argument.is_multiple_of(alignment);
        if !self.arguments.iter().zip(self.kernel.alignments).all(aligned) {
            let rule = format!("{} with misaligned arguments {:x?}", self.kernel.name, self.arguments);
            return Err(call.broken(CUDA_ERROR_MISALIGNED_ADDRESS, rule));
        }
        let [first, second, third, fourth] = [0, 1, 2, 3].map(|at| self.argument(at));
        match self.kernel.body {
            Body::Xor => self.xor(third as u32),
            Body::Pattern => {
                let words = Words::<u64>::new(first, second / 8);
                (0..words.count).for_each(|at| words.write(at, mix(third.wrapping_add(at))));
            }
            Body::Check => {
                let words = Words::<u64>::new(first, second / 8);
                let differs = |&at: &u64| words.read(at) != mix(third.wrapping_add(at));
                let count = (0..words.count).filter(differs).count() as u64;
                counter(fourth).fetch_add(count, Ordering::SeqCst);
            }
            Body::Hash => self.hash(),
            Body::Spin => nap(first),
            Body::Fma => self.fma(),
            Body::Touch => self.touch(),
            Body::Smid => {
                let words = Words::<u32>::new(first, u64::from(self.blocks));
                (0..words.count).for_each(|block| words.write(block, stream.sms.of_block(block)));
                nap(second);
            }
            Body::Flag => write_flag(first, second as u32),
            Body::Await => return await_flag(first, Some(third), |found| found == second as u32),
        }
        Ok(())
    }

    fn xor(&self, mask: u32) {
        let words = Words::<u32>::new(self.argument(0), (self.argument(1) / 4).min(self.all_threads()));
        (0..words.count).for_each(|at| words.write(at, words.read(at) ^ mask));
    }

    fn hash(&self) {
        let [at, chunk, out] = [0, 1, 2].map(|at| self.argument(at));
        for block in (0..u64::from(self.blocks)).filter(|_| chunk > 0) {
            let words = Words::<u64>::new(at + block * chunk, chunk / 8);
            let key = |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let sum = (0..words.count).fold(0_u64, |sum, at| sum.wrapping_add(mix(words.read(at) ^ key(at))));
            counter(out + block * 8).fetch_add(sum, Ordering::SeqCst);
        }
    }

    fn fma(&self) {
        let out = Words::<f32>::new(self.argument(0), self.all_threads());
        // The result depends on the thread, and not on the block.
        let rounds = self.argument(1) as u32;
        let block: Vec<f32> = (0..self.threads).map(|thread| fma_chains(thread as f32, rounds)).collect();
        (0..out.count).for_each(|at| out.write(at, block[(at % block.len() as u64) as usize]));
    }

    fn touch(&self) {
        let [at, bytes, rounds, out] = [0, 1, 2, 3].map(|at| self.argument(at));
        // An even number of rounds flips each bit twice.
        if bytes > 0 && rounds % 2 == 1 {
            let words = Words::<u64>::new(at, bytes.next_multiple_of(16) / 8);
            let fold = (0..words.count).fold(0, |fold, at| fold ^ words.read(at));
            counter(out).fetch_xor(fold, Ordering::SeqCst);
        }
    }
}

/// Returns the sum of the four chains of a thread of `millrace_fma`.
fn fma_chains(thread: f32, rounds: u32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the instructions.
        return unsafe { fma_chains_in_hardware(thread, rounds) };
    }
    fma_chains_of(thread, rounds)
}

/// Computes [`fma_chains_of`] without a call of the mathematics library for each step.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
fn fma_chains_in_hardware(thread: f32, rounds: u32) -> f32 {
    fma_chains_of(thread, rounds)
}

#[inline(always)]
fn fma_chains_of(thread: f32, rounds: u32) -> f32 {
    const M: f32 = 0.999_023_44; // 1 - 2^-10
    const C: f32 = 0.000_976_562_5; // 2^-10
    let mut chains = [thread, thread + 1.0, thread + 2.0, thread + 3.0];
    for _ in 0..rounds {
        for chain in &mut chains {
            for _ in 0..8 {
                *chain = chain.mul_add(M, C);
            }
        }
    }
    (chains[0] + chains[1]) + (chains[2] + chains[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_chains_are_exact() {
        assert_eq!(0.999_023_44_f32.to_bits(), 0x3f7f_c000);
        assert_eq!(0.000_976_562_5_f32.to_bits(), 0x3a80_0000);
    }

    #[test]
    fn every_parameter_has_an_alignment() {
        for kernel in KERNELS {
            assert_eq!(kernel.parameters.len(), kernel.alignments.len(), "{}", kernel.name);
        }
    }
}
