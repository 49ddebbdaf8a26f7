/* SPDX-License-Identifier: Apache-2.0 */
/* Names that share their tail, names that lie, and one that would fill the memory when spelt out. */
	.text

	.macro function name
	.globl "\name"
	.type "\name", @function
"\name":
	nop
	nop
	ret
	.size "\name", . - "\name"
	.endm

	function tail_of_a_name
	function long_tail_of_a_name
	function _Znot_a_mangled_name
	/* Each Sn_ stands for the one before it, and every pair doubles the text. */
	function _Z1fSt4pairIiiES_IS0_S0_ES_IS1_S1_ES_IS2_S2_ES_IS3_S3_ES_IS4_S4_ES_IS5_S5_ES_IS6_S6_ES_IS7_S7_ES_IS8_S8_ES_IS9_S9_ES_ISA_SA_ES_ISB_SB_ES_ISC_SC_ES_ISD_SD_ES_ISE_SE_ES_ISF_SF_ES_ISG_SG_ES_ISH_SH_ES_ISI_SI_ES_ISJ_SJ_ES_ISK_SK_ES_ISL_SL_ES_ISM_SM_ES_ISN_SN_E

	.globl two_names, __two_names
	.type two_names, @function
	.type __two_names, @function
two_names:
__two_names:
	nop
	ret
	.size two_names, . - two_names
	.size __two_names, . - __two_names

	.globl unsized
unsized:
	nop
	nop
	ret

	.section .other, "ax", @progbits
	nop
	nop

	.section .note.GNU-stack, "", @progbits
