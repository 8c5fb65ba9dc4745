//! Symbols that libibverbs exports to user-space drivers of adapters (node `IBVERBS_PRIVATE_34`).
//!
//! No such driver runs on this library. But programs link libmlx5 and libefa directly, often with eager
//! binding. So every name must resolve. Registration is accepted and ignored; kernel commands return
//! EOPNOTSUPP. Definitions omit parameters that they do not read: in the C calling convention the caller owns
//! the arguments.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::atomic::AtomicBool,
};

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// Commands to the kernel; each returns a positive error number.
macro_rules! kernel_commands {
    ($($name:ident)*) => { $(
        /// A command to the kernel: EOPNOTSUPP.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            errno::status(Err(Errno::UNSUPPORTED))
        }
    )* };
}

kernel_commands! {
    execute_ioctl
    ibv_cmd_advise_mr
    ibv_cmd_alloc_dm
    ibv_cmd_alloc_mw
    ibv_cmd_alloc_pd
    ibv_cmd_attach_mcast
    ibv_cmd_close_xrcd
    ibv_cmd_create_ah
    ibv_cmd_create_counters
    ibv_cmd_create_cq
    ibv_cmd_create_cq_ex
    ibv_cmd_create_flow
    ibv_cmd_create_flow_action_esp
    ibv_cmd_create_qp
    ibv_cmd_create_qp_ex
    ibv_cmd_create_qp_ex2
    ibv_cmd_create_rwq_ind_table
    ibv_cmd_create_srq
    ibv_cmd_create_srq_ex
    ibv_cmd_create_wq
    ibv_cmd_dealloc_mw
    ibv_cmd_dealloc_pd
    ibv_cmd_dereg_mr
    ibv_cmd_destroy_ah
    ibv_cmd_destroy_counters
    ibv_cmd_destroy_cq
    ibv_cmd_destroy_flow
    ibv_cmd_destroy_flow_action
    ibv_cmd_destroy_qp
    ibv_cmd_destroy_rwq_ind_table
    ibv_cmd_destroy_srq
    ibv_cmd_destroy_wq
    ibv_cmd_detach_mcast
    ibv_cmd_free_dm
    ibv_cmd_get_context
    ibv_cmd_modify_cq
    ibv_cmd_modify_flow_action_esp
    ibv_cmd_modify_qp
    ibv_cmd_modify_qp_ex
    ibv_cmd_modify_srq
    ibv_cmd_modify_wq
    ibv_cmd_open_qp
    ibv_cmd_open_xrcd
    ibv_cmd_poll_cq
    ibv_cmd_post_recv
    ibv_cmd_post_send
    ibv_cmd_post_srq_recv
    ibv_cmd_query_context
    ibv_cmd_query_device_any
    ibv_cmd_query_mr
    ibv_cmd_query_port
    ibv_cmd_query_qp
    ibv_cmd_query_srq
    ibv_cmd_read_counters
    ibv_cmd_reg_dm_mr
    ibv_cmd_reg_dmabuf_mr
    ibv_cmd_reg_mr
    ibv_cmd_req_notify_cq
    ibv_cmd_rereg_mr
    ibv_cmd_resize_cq
}

/// Calls of drivers without a result. They have no effect here.
macro_rules! driver_notifications {
    ($($name:ident)*) => { $(
        /// A driver's call without a result: does nothing.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() {}
    )* };
}

driver_notifications! {
    __verbs_log
    verbs_init_cq
    verbs_register_driver_34
    verbs_set_ops
    verbs_uninit_context
}

/// Whether drivers may destroy objects of a removed device. Only drivers read it.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the C name")]
pub static verbs_allow_disassociate_destroy: AtomicBool = AtomicBool::new(false);

/// A driver's context: none, EOPNOTSUPP.
#[unsafe(no_mangle)]
pub extern "C" fn _verbs_init_and_alloc_context() -> *mut c_void {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Opens a device with its driver's private data: no device here has such a driver, EOPNOTSUPP.
#[unsafe(no_mangle)]
pub extern "C" fn verbs_open_device(
    _device: *mut ibv_device,
    _private_data: *mut c_void,
) -> *mut ibv_context {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Reads an attribute of a kernel device: -1, EOPNOTSUPP.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_read_ibdev_sysfs_file() -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// The length of a chain of ioctl attributes, whose first buffer has `num_attrs` of them. No command is
/// executed, so the rest of the chain is not read.
#[unsafe(no_mangle)]
pub extern "C" fn __ioctl_final_num_attrs(num_attrs: c_uint, _next: *mut c_void) -> c_uint {
    num_attrs
}
