//! Reasons why NVML gives no GPUs, with the next step of the operator.

/// Lowest supported major version of the NVIDIA driver: the first with CUDA 13.0.
pub const DRIVER_MIN: u32 = 580;

/// Reason why the GPUs of this machine cannot be used or asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The library of the NVIDIA driver is missing.
    #[error("no NVIDIA driver on this machine: libnvidia-ml.so.1 cannot be opened")]
    NoDriver,
    /// The library is installed, but the kernel module does not answer.
    #[error("the NVIDIA driver is not loaded: libnvidia-ml.so.1 cannot reach the kernel module")]
    DriverNotLoaded,
    /// The driver is older than [`DRIVER_MIN`], or its version is not a number.
    #[error("the NVIDIA driver {found} is too old: Millrace needs version {DRIVER_MIN} or newer")]
    DriverTooOld {
        /// Version of the installed driver.
        found: String,
    },
    /// The driver works and has no GPU.
    #[error("no NVIDIA GPU on this machine: the driver finds none")]
    NoGpu,
    /// The driver has GPUs, and no program can use them.
    #[error("no usable NVIDIA GPU on this machine: {gpu} {reason}")]
    NoUsableGpu {
        /// Name of the first such GPU.
        gpu: String,
        /// Reason why that GPU is excluded.
        reason: String,
    },
    /// A GPU fell off the bus or needs a reset.
    #[error("GPU {gpu} is lost: {reason}")]
    GpuLost {
        /// UUID of the GPU.
        gpu: String,
        /// Answer of NVML.
        reason: String,
    },
    /// NVML refused a request without which discovery cannot continue.
    #[error("NVML failed to {request}: {reason}")]
    Nvml {
        /// Request, as a verb with its object.
        request: &'static str,
        /// Answer of NVML.
        reason: String,
    },
    /// The operating system refused a thread.
    #[error("cannot start the thread that watches the GPUs: {0}")]
    Thread(String),
}

impl Error {
    /// Returns the next step of the operator, which a program prints on a line of its own.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoDriver | Self::DriverTooOld { .. } => {
                "install an NVIDIA driver (580 or newer), or start with --device emulated"
            }
            Self::DriverNotLoaded => {
                "load the kernel module nvidia, or pass the GPUs to this container, or start with --device emulated"
            }
            Self::NoGpu => {
                "check `lspci` for the GPU, or pass the GPUs to this container, or start with --device emulated"
            }
            Self::NoUsableGpu { .. } => {
                "create a MIG instance, turn MIG off, or reset the GPU; or start with --device emulated"
            }
            Self::GpuLost { .. } => {
                "see the kernel log for the Xid, then reset the GPU or restart the machine"
            }
            Self::Nvml { .. } => {
                "run nvidia-smi, which asks the same library, or start with --device emulated"
            }
            Self::Thread(_) => "raise the limit of processes (ulimit -u)",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_the_lowest_driver() {
        assert!(Error::NoDriver.hint().contains(&DRIVER_MIN.to_string()));
    }

    #[test]
    fn a_missing_driver_has_the_text_of_the_manual() {
        assert_eq!(
            Error::NoDriver.to_string(),
            "no NVIDIA driver on this machine: libnvidia-ml.so.1 cannot be opened"
        );
        assert_eq!(
            Error::NoDriver.hint(),
            "install an NVIDIA driver (580 or newer), or start with --device emulated"
        );
    }
}
