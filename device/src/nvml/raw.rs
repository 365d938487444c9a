//! Functions of NVML that nvml-wrapper 0.13 lacks or breaks, by their symbols.
#![allow(unsafe_code, reason = "nvml-wrapper has no safe form of these functions")]

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};

use super::record::{Fabric, FabricState, RemoteKind};

/// `nvmlGpuFabricInfo_v2_t` of nvml.h: nvml-wrapper does not export the struct of its bindings.
/// Version 3 only adds a summary of the health.
#[repr(C)]
#[derive(Debug, Default)]
struct FabricInfoV2 {
    version: u32,
    cluster_uuid: [u8; 16],
    status: u32,
    clique_id: u32,
    state: u8,
    health_mask: u32,
}

/// `NVML_STRUCT_VERSION(GpuFabricInfo, 2)`: the size of the struct, and the version in the top byte.
const FABRIC_INFO_V2: u32 = size_of::<FabricInfoV2>() as u32 | (2 << 24);

/// Returns the kind of the device at the other end of an NVLink. The wrapper's own method passes NVML
/// a temporary copy, and so always returns "unknown" (`nv_link.rs:586-600`).
pub(super) fn remote_kind(device: &Device<'_>, link: u32) -> Result<RemoteKind, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind = u32::MAX;
    // SAFETY: the handle is of a device of this open library, and `kind` lives across the call. The
    // function writes a C enum, which has 32 bits, and keeps no pointer.
    nvml_try(unsafe { symbol(device.handle(), link, &raw mut kind) })?;
    Ok(match kind {
        0 => RemoteKind::Gpu,
        1 => RemoteKind::Cpu,
        2 => RemoteKind::Switch,
        _ => RemoteKind::Unknown,
    })
}

/// Returns the state of the GPU's registration with the NVLink fabric.
pub(super) fn fabric(device: &Device<'_>) -> Result<Fabric, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuFabricInfoV.as_ref())?;
    let mut info = FabricInfoV2 { version: FABRIC_INFO_V2, ..FabricInfoV2::default() };
    // SAFETY: the handle is of a device of this open library. NVML reads the size and the version of
    // the struct from its first field and writes no more than that size; `info` lives across the
    // call, and every field may hold any bits.
    nvml_try(unsafe { symbol(device.handle(), (&raw mut info).cast()) })?;
    Ok(Fabric {
        state: match info.state {
            1 => FabricState::NotStarted,
            2 => FabricState::InProgress,
            3 => FabricState::Completed,
            _ => FabricState::NotSupported,
        },
        status: info.status,
        cluster: info.cluster_uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
        clique: info.clique_id,
    })
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The offsets that a C compiler gives the fields of `nvmlGpuFabricInfo_v2_t`.
    #[test]
    fn fabric_info_has_the_layout_of_the_header() {
        let offsets = [
            offset_of!(FabricInfoV2, version),
            offset_of!(FabricInfoV2, cluster_uuid),
            offset_of!(FabricInfoV2, status),
            offset_of!(FabricInfoV2, clique_id),
            offset_of!(FabricInfoV2, state),
            offset_of!(FabricInfoV2, health_mask),
        ];
        assert_eq!(offsets, [0, 4, 20, 24, 28, 32]);
        assert_eq!(FABRIC_INFO_V2, 0x0200_0024);
    }
}
