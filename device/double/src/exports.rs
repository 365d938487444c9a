//! The macro that defines the functions of the driver.
#![allow(unsafe_code, reason = "exports C functions")]

/// Defines functions of the driver. A function has the driver's name and signature; the constant after it
/// does not compile if the signature differs from that of cudarc's bindings. The word before the name says
/// which state the function requires: see [`calls::Requires`].
macro_rules! driver {
    ($($(#[$meta:meta])* $requires:ident fn $name:ident($($arg:ident: $kind:ty),* $(,)?) |$call:ident| $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $kind),*) -> cudarc::driver::sys::CUresult {
            $crate::calls::answer(stringify!($name), $crate::calls::Requires::$requires, |$call| $body)
        }
        const _: unsafe fn($($kind),*) -> cudarc::driver::sys::CUresult = cudarc::driver::sys::$name;
    )*};
}
