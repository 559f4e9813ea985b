// MPICH 4.0 over UCX hangs in MPI_Finalize if ranks are connected over TCP (UCX_TLS=tcp, or ^cma on one host, or
// several hosts). It closes its connections with ucp_disconnect_nb, which sends the remaining data and, over TCP, waits
// for the peer's answer. Then it waits in PMI for the other ranks and answers no peer any more, so a rank that is
// slightly later waits for its answer forever.
//
// MPICH finds this function before UCX's, because this module has loaded MPICH. It does nothing and reports completion:
// the connections are then closed with UCX's worker, after all ranks have synchronized in PMI. Nothing is lost, because
// MPI is finalized only after a barrier (library.cpp). A program that is linked with MPICH itself uses UCX's function.
#include <mpi.h>

#if defined(MPICH_VERSION)
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* endpoint);
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* /*endpoint*/) { return nullptr; }
#endif
